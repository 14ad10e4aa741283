#!/bin/zsh -f
# zsh_completion.zsh SCRIPT LINE...: types each line and a tab into an interactive zsh that has the completion
# script, and prints what the line has become, in brackets.
zmodload zsh/zpty || exit 77
zpty shell "TERM=dumb PS1= PS2= zsh -f -i"
send() { zpty -w -n shell "$1"$'\n'; }
send "unsetopt zle_bracketed_paste prompt_cr prompt_sp; stty -echo; fpath=(${(j: :)fpath})"
send "autoload -Uz compinit; compinit -D -u; source ${(q)1}"
send 'show() { print -r -- "<[$BUFFER]>"; BUFFER= }; zle -N show; bindkey "^X" show; print ready'
output=
while [[ $output != *ready* ]]; do zpty -r shell more || exit 1; output+=$more; done
for line in "${@[2,-1]}"; do
    zpty -w -n shell "$line"$'\t\x18'
    output=
    while [[ $output != *'<['*']>'* ]]; do zpty -r shell more || exit 1; output+=$more; done
    output=${output##*'<['}
    print -r -- "[${output%%']>'*}]"
done
zpty -d shell
