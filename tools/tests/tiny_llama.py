"""A small random Llama with a byte tokenizer that has one merge, for the tests of the tools. Needs torch."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

AB = 256          # token "ab", so that ids [97, 98] are not what encoding "ab" gives
START, END, VOCAB = 257, 258, 260
CHATML = ("{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
          "{% if add_generation_prompt %}<start>assistant\n{% endif %}")
MARKED = ("{% for m in messages %}<start>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
          "{{ m['content'] }}{% endgeneration %}<end>\n{% else %}{{ m['content'] }}<end>\n{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}<start>assistant\n{% endif %}")
FORGETFUL = ("{% for m in messages %}<start>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}..."
             "{% else %}{{ m['content'] }}{% endif %}<end>\n{% endfor %}"
             "{% if add_generation_prompt %}<start>assistant\n{% endif %}")


def byte_characters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def make_tokenizer(template=CHATML):
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    core = Tokenizer(models.BPE(vocab={**vocab, "ab": AB}, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<start>", "<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def make_model():
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         eos_token_id=END, bos_token_id=START, pad_token_id=END, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            if "lm_head" in name:  # ends answers now and then
                weight[END] *= 1.5
    return model


def save(folder, template=CHATML):
    make_model().save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
