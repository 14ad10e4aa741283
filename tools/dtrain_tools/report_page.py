"""The page of a report: one HTML file that needs nothing else, readable on light and on dark backgrounds.

Figures are put into it as SVG whose colours are exchanged for names, which the page defines for both.
"""

import html
import io
import json
import re

from dtrain_tools import report_data as data
from dtrain_tools import report_figures as figures

# name: (light, dark). The light ones are those that figures are drawn in.
COLOURS = {
    "paper": (figures.PAPER, "#15181d"), "ink": (figures.INK, "#e8ebf0"), "muted": (figures.MUTED, "#98a2b3"),
    "grid": (figures.GRID, "#2c323c"), "rest": (figures.PART_COLOURS[data.REST], "#525b6b"),
    **{f"series{i}": (light, dark) for i, (light, dark) in enumerate(zip(figures.SERIES, (
        "#6fa5ff", "#f3a14e", "#4fc58d", "#bf90f2", "#ff7c90", "#50c2dc", "#cf9f70", "#a7b0c0")))},
}

STYLE = """
:root { color-scheme: light dark; LIGHT --page: #f4f6f9; --shade: rgba(36, 99, 200, .14); }
@media (prefers-color-scheme: dark) { :root { DARK --page: #0e1013; --shade: rgba(111, 165, 255, .22); } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1280px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 34px 0 12px; }
.lead { font-size: 17px; margin: 8px 0 0; } .about, .note { color: var(--muted); font-size: 13.5px; margin: 4px 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.card, figure, .table { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px; }
.card { padding: 12px 16px; } .card b { display: block; font-size: 24px; font-weight: 650; line-height: 1.25; }
.card span { color: var(--muted); font-size: 13px; } .card .alarm { color: var(--series4); }
.figures { display: grid; grid-template-columns: repeat(12, 1fr); gap: 14px; }
figure { margin: 0; padding: 12px 12px 6px; overflow: hidden; }
figure.w4 { grid-column: span 4; } figure.w6 { grid-column: span 6; } figure.w12 { grid-column: span 12; }
figure svg { display: block; width: 100%; height: auto; }
@media (max-width: 860px) { figure[class] { grid-column: span 12; } }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { color: var(--muted); font-weight: 500; text-align: right; vertical-align: bottom; line-height: 1.3; }
th, td { padding: 7px 7px; border-bottom: 1px solid var(--grid); }
td { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; } tr:last-child td { border-bottom: 0; }
th.text, td.text { text-align: left; } th:first-child, td:first-child { padding-left: 14px; } tr.best td { font-weight: 650; }
td.bar { background: linear-gradient(to right, var(--shade) var(--part), transparent var(--part)); }
.mark { font-size: 12px; font-weight: 500; border: 1px solid currentColor; border-radius: 99px; padding: 1px 8px;
  margin-right: 6px; color: var(--series0); } .mark.front { color: var(--series2); } .mark.state { color: var(--muted); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
"""

SECTIONS = (("best", "Which is best"), ("learning", "Is it learning"), ("speed", "What does it take"))


def colour_names(kind):
    return " ".join(f"--{name}: {pair[kind]};" for name, pair in COLOURS.items())


def inline_svg(drawn, name):
    """A figure as SVG that stands in a page: its own ids, colours by name."""
    text = io.StringIO()
    figures.save(drawn, text, "svg")
    svg = text.getvalue()
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # the page's
    for colour, (light, _) in COLOURS.items():
        svg = re.sub(light, f"var(--{colour})", svg, flags=re.I)
    return svg


# ---- words -------------------------------------------------------------------------------------------------------

def shown(value, form):
    return "–" if value is None else form(value)


def three(value):
    return f"{value:.3f}"


def name_of(report, run):
    return figures.Styles(report).name(run) if report.keys else run.label


def lead(report):
    """The first sentence: what came out."""
    if len(report.runs) > 1:
        return lead_of_several(report)
    found = report.summaries[report.runs[0].label]
    text = f"Step {found['step']:,}"
    if found["steps_wanted"]:
        text += f" of {max(found['steps_wanted'], found['step']):,}"
    if found["best_walk"] is None:
        return text + (". Nothing has been validated yet." if not report.runs[0].validations else
                       ". Nothing has been validated since the start.")
    first = f", from {found['first_walk']:.3f} at the start" if report.runs[0].validations[0]["step"] == 0 and \
        found["first_walk"] is not None else ""
    return (text + f". In validation a block is accepted for {found['best_walk']:.3f} tokens at best "
            f"(step {found['best_step']:,}){first}.")


def lead_of_several(report):
    if report.best is None:
        return f"{len(report.runs)} runs; none has a loss yet."
    best = next(run for run in report.runs if run.label == report.best)
    scores = sorted((report.score(label) for label in report.compared if report.score(label) is not None), reverse=True)
    what = "accept_len_walk" if report.scored else "loss"
    text = f"Best: {name_of(report, best)}, {what} {abs(scores[0]):.3f}"
    if len(scores) > 1:
        ahead = scores[0] - scores[1]
        text += f", {ahead:.3f} ahead of the next" if ahead >= 5e-4 else ", as good as the next"
    return text + "."


def about(report):
    run = report.runs[0]
    parts = [f"{len(report.runs)} runs" if len(report.runs) > 1 else run.folder]
    if report.missing:
        parts.append(f"{len(report.missing)} points without numbers")
    where = [run.execution.get("hardware"), run.execution.get("compute")]
    ranks = run.execution.get("ranks")
    if isinstance(ranks, int) and ranks > 1:
        where.append(f"{ranks} ranks")
    return " · ".join(parts + [str(part) for part in where if part])


def cards(report):
    """The numbers that are asked for first."""
    label = report.best if report.best is not None else report.runs[0].label
    found = report.summaries[label]
    wait = found["wait_share"]
    rows = [(shown(found["best_walk"], three), "accept_len_walk, best", ""),
            (shown(found["loss"], three), "training loss, last tenth", ""),
            (shown(found["tokens_per_second"], figures.format_count), "tokens/s", ""),
            (shown(found["mfu"], figures.format_percent), "model FLOPs utilisation", ""),
            (shown(wait, figures.format_percent), "of the time waiting for data", "alarm" if (wait or 0) > 0.05 else ""),
            (shown(found["memory_bytes"], figures.format_bytes), "memory", ""),
            (shown(found["seconds"], figures.format_seconds), "for all steps", "")]
    rows = [row for row in rows if row[0] != "–"]
    head = "" if len(report.runs) == 1 else '<p class="note">The best one:</p>'
    return head + '<div class="cards">' + "".join(
        f'<div class="card"><b class="{kind}">{html.escape(value)}</b><span>{what}</span></div>'
        for value, what, kind in rows) + "</div>"


# ---- the table ---------------------------------------------------------------------------------------------------

COLUMNS = (("best_walk", "accept_len_walk", three), ("best_step", "at step", figures.format_step),
           ("overlap", "overlap", three), ("val_loss", "val loss", three), ("loss", "loss", three),
           ("step", "steps", figures.format_step), ("seconds", "time", figures.format_seconds),
           ("block_rows_per_second", "block rows/s", figures.format_count),
           ("tokens_per_second", "tokens/s", figures.format_count), ("mfu", "MFU", figures.format_percent),
           ("wait_share", "data wait", figures.format_percent), ("memory_bytes", "memory", figures.format_bytes))


def marks(report, label):
    found = ""
    if label == report.best:
        found += '<span class="mark">best</span>'
    fronts = [name for cost, name in (("seconds", "time"), ("memory_bytes", "memory")) if label in report.fronts[cost]]
    if fronts:
        found += f'<span class="mark front" title="on the Pareto front: no other run is at least as good with less ' \
                 f'{" or ".join(fronts)}">front: {", ".join(fronts)}</span>'
    return found


def table(report):
    columns = [column for column in COLUMNS
               if any(found[column[0]] is not None for found in report.summaries.values())]
    columns = [column for column in columns if column[0] not in ("step", "best_step") or
               len({found[column[0]] for found in report.summaries.values()}) > 1]
    if not report.one_kind():
        columns = [column for column in columns if column[0] != "block_rows_per_second"]
    columns[1:1] = [(f"walk_{drafts}", f"{drafts} draft" + "s" * (drafts > 1), three) for drafts in report.drafts()]
    keys = report.keys
    styles = figures.Styles(report)
    head = "".join(f'<th class="text">{html.escape(report.short(key))}</th>' for key in keys) or \
        '<th class="text">run</th>'
    head += '<th class="text"></th>' + "".join(f"<th>{title}</th>" for _, title, _ in columns)
    known = [report.score(run.label) for run in report.runs if report.score(run.label) is not None]
    low, high = min(known, default=0), max(known, default=0)
    body = ""
    for run in sorted(report.runs, key=lambda run: report.rank(run.label), reverse=True):
        found, score = report.summaries[run.label], report.score(run.label)
        names = [run.values[key] for key in keys] or [run.label]
        swatch = f'<span class="swatch" style="background: {by_name(styles.colours[run.label])}"></span>'
        cells = "".join(f'<td class="text">{swatch * (i == 0)}{html.escape(name)}</td>' for i, name in enumerate(names))
        state = f'<span class="mark state">{html.escape(run.state)}</span>' if run.state else ""
        cells += f'<td class="text">{state}{marks(report, run.label)}</td>'
        for name, _, form in columns:
            bar = ""
            if name == report.score_name and score is not None and high > low:
                bar = f' class="bar" style="--part: {8 + 92 * (score - low) / (high - low):.1f}%"'
            cells += f"<td{bar}>{html.escape(shown(found[name], form))}</td>"
        best = ' class="best"' if run.label == report.best else ""
        body += f"<tr{best}>{cells}</tr>"
    for label, (values, state, reason) in report.missing.items():
        cells = "".join(f'<td class="text">{html.escape(values[key])}</td>' for key in keys)
        words = html.escape(state.replace("_", " ") + (f": {reason}" if reason else ""))
        body += f'<tr>{cells}<td class="text note" colspan="{len(columns) + 1}">{words}</td></tr>'
    several = len({run.most_drafts() for run in report.runs}) > 1 and report.scored
    note = '<p class="note">Runs have different numbers of drafts; the columns of drafts compare them at the same ' \
           "number.</p>" if several and report.drafts() else ""
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def by_name(light):
    return next((f"var(--{name})" for name, pair in COLOURS.items() if pair[0] == light), light)


# ---- the page ----------------------------------------------------------------------------------------------------

def page(report, drawn):
    """drawn: [(Figure, matplotlib figure)]"""
    parts = []
    for section, title in SECTIONS:
        inside = [(figure, plot) for figure, plot in drawn if figure.section == section]
        if section == "best" and (len(report.runs) > 1 or report.missing):
            parts.append(f"<h2>{title}</h2>{table(report)}<p></p>")
        elif inside:
            parts.append(f"<h2>{title}</h2>")
        if inside:
            parts.append('<div class="figures">' + "".join(
                f'<figure class="w{figure.width}">{inline_svg(plot, figure.name)}</figure>' for figure, plot in inside) + "</div>")
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in report.notes)
    style = STYLE.replace("LIGHT", colour_names(0)).replace("DARK", colour_names(1))
    numbers = json.dumps(data.as_json(report), separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(report.title)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>\n'
            f'<h1>{title}</h1><p class="lead">{html.escape(lead(report))}</p>'
            f'<p class="about">{html.escape(about(report))}</p>{cards(report)}\n' + "\n".join(parts) + notes +
            f'\n<script type="application/json" id="numbers">{numbers}</script>\n</body></html>\n')
