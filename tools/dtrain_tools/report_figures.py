"""Figures of a report, drawn with matplotlib. Which numbers they show is report_data's.

A figure is drawn once, in the colours of a light background; report_page exchanges them for others on a dark one,
which is why every colour here has one meaning.
"""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import LinearSegmentedColormap  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: E402

from dtrain_tools import report_data as data  # noqa: E402

PAPER, INK, MUTED, GRID = "#fefefe", "#1d2430", "#667085", "#e3e7ed"
SERIES = ("#2463c8", "#d9730e", "#1a8a5b", "#8b40c6", "#c9314b", "#0e8aa7", "#8a5b2c", "#56617a")
PART_COLOURS = {"wait_seconds": "#c9314b", "copy_seconds": "#d9730e", "forward_seconds": "#2463c8",
                "loss_seconds": "#0e8aa7", "backward_seconds": "#8b40c6", "optimizer_seconds": "#1a8a5b",
                "exchange_seconds": "#8a5b2c", data.REST: "#b3bbc9"}
PART_NAMES = {"wait_seconds": "data wait", "copy_seconds": "copy to device", "forward_seconds": "forward",
              "loss_seconds": "loss", "backward_seconds": "backward", "optimizer_seconds": "update",
              "exchange_seconds": "exchange", data.REST: "host, other"}
HEAT = LinearSegmentedColormap.from_list("heat", ["#eef4fd", "#9cc2f2", "#3a7bd5", "#123a7a"])
COST = LinearSegmentedColormap.from_list("cost", ["#fdf3e7", "#f5c489", "#d9802b", "#7a3c08"])
DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.4, 1.2, 1.4)))
SIZE, WIDE, SMALL = (5.6, 3.3), (11.4, 3.3), (3.7, 3.0)  # inches: half a row, a row, a third
MOST_LINES = 8  # of runs that are told apart by colours

STYLE = {
    "font.family": "sans-serif", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "dtrain",
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "figure.titlesize": 10.5, "figure.titleweight": "bold",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 3, "ytick.major.size": 0,
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round", "legend.frameon": False, "legend.fontsize": 8.5,
    "legend.handlelength": 1.8, "legend.borderaxespad": 0, "legend.columnspacing": 1.2,
}


class Figure:
    """name: of files; section: where on the page; width: of the page, in twelfths."""

    def __init__(self, name, section, plot, width=6):
        self.name, self.section, self.plot, self.width = name, section, plot, width


# ---- numbers as people read them ---------------------------------------------------------------------------------

def format_count(value, _=None):
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def format_step(value, _=None):
    return f"{value:,.0f}" if value < 1e5 else format_count(value)


BYTE_UNITS = ((2 ** 40, "TiB"), (2 ** 30, "GiB"), (2 ** 20, "MiB"), (2 ** 10, "KiB"))  # as `dtrain plan` has them


def format_bytes(value, _=None, digits=3):
    for limit, unit in BYTE_UNITS:
        if abs(value) >= limit:
            return f"{value / limit:.{max(digits, len(str(int(value / limit))))}g} {unit}"
    return f"{value:.0f} B"


def format_close_bytes(value, _=None):
    """Of axes that do not begin at 0, whose ticks may be close to each other."""
    return format_bytes(value, digits=4)


class ByteLocator(MaxNLocator):
    """Ticks at round numbers of the unit."""

    def tick_values(self, vmin, vmax):
        most = max(abs(vmin), abs(vmax))
        unit = next((limit for limit, _ in BYTE_UNITS if most >= limit), 1)
        return [tick * unit for tick in super().tick_values(vmin / unit, vmax / unit)]


def locate(axis, ticks, form):
    axis.set_major_formatter(FuncFormatter(form))
    locator = ByteLocator if form in (format_bytes, format_close_bytes) else MaxNLocator
    axis.set_major_locator(locator(ticks, steps=[1, 2, 5, 10]))  # percents are shown without halves


def format_seconds(value, _=None):
    if value >= 3600:
        return f"{int(value // 3600)}:{int(value // 60 % 60):02} h"
    if value >= 60:
        return f"{int(value // 60)}:{int(value % 60):02} min"
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def format_percent(value, _=None):
    return f"{100 * value:.0f} %" if value >= 0.1 or value < 5e-4 else f"{100 * value:.1f} %"


def format_plain(value, _=None):
    return f"{value:.3g}"


# ---- what all have in common -------------------------------------------------------------------------------------

def start(title, size=SIZE, unit=None, steps=True):
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    if unit:
        axes.set_ylabel(unit)
    if steps:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(format_step))
        axes.margins(x=0.01)
    return figure, axes


def legend(axes, most=8, **options):
    handles, labels = axes.get_legend_handles_labels()
    if handles and len(handles) <= most:
        axes.legend(handles, labels, loc="best", **options)


class Styles:
    """Colour and dash of each run: colours by the key of most values, dashes by the next one; many runs that differ
    in no key are grey but for the best."""

    def __init__(self, report):
        self.report, self.colours, self.dashes = report, {}, {}
        labels = [run.label for run in report.runs]
        keys = sorted(report.keys, key=lambda key: -len(report.axis(key)))[:2]
        if len(labels) > 3 and len(keys) == 2 and len(report.axis(keys[0])) <= MOST_LINES and \
                len(report.axis(keys[1])) <= len(DASHES) and len(report.keys) == 2:
            self.keys = keys
            for run in report.runs:
                self.colours[run.label] = SERIES[report.axis(keys[0]).index(run.values[keys[0]])]
                self.dashes[run.label] = DASHES[report.axis(keys[1]).index(run.values[keys[1]])]
            return
        self.keys = []
        for i, label in enumerate(labels):
            grey = len(labels) > MOST_LINES and label != report.best
            self.colours[label] = MUTED if grey else SERIES[0 if len(labels) > MOST_LINES else i]
            self.dashes[label] = "-"

    def of(self, label):
        return {"color": self.colours[label], "linestyle": self.dashes[label]}

    def name(self, run):
        """What a run is called in legends."""
        if not self.report.keys:
            return run.label
        return ", ".join(f"{self.report.short(key)} {run.values[key]}" for key in self.report.keys)

    def brief(self, run):
        """Its values alone, in the order that brief_of says."""
        return ", ".join(run.values[key] for key in self.report.keys) or run.label

    def brief_of(self):
        return ", ".join(self.report.short(key) for key in self.report.keys)

    def legend(self, axes, **options):
        """Of a figure with a line a run; by keys where colours and dashes stand for them."""
        if not self.keys:
            runs = self.report.runs
            if len(runs) > MOST_LINES:
                runs = [run for run in runs if run.label == self.report.best]
            handles = [plt.Line2D([], [], **self.of(run.label), label=self.name(run) + " (best)" * (len(runs) == 1))
                       for run in runs]
        else:
            handles = []
            for at, key in enumerate(self.keys):
                used = {run.values[key] for run in self.report.runs}
                for i, value in enumerate(self.report.axis(key)):
                    if value not in used:
                        continue
                    look = {"color": SERIES[i]} if at == 0 else {"color": MUTED, "linestyle": DASHES[i]}
                    handles.append(plt.Line2D([], [], **look, label=f"{self.report.short(key)} {value}"))
        axes.legend(handles=handles, loc="best", ncols=2 if len(handles) > 4 else 1, **options)


def draw_curve(axes, steps, values, colour, linestyle="-", raw=True, label=None, width=1.8):
    """A noisy curve: each value faintly, and their running mean."""
    wide = data.smoothing(len(values))
    if raw and wide > 1:
        axes.plot(*data.thin(steps, values), color=colour, alpha=0.22, linewidth=0.7)
    axes.plot(*data.thin(steps, data.smooth(values, wide)), color=colour, linestyle=linestyle, label=label,
              linewidth=width)


def limit_by_the_later(axes, curves):
    """A loss begins far above all that follows: the axis shows what comes after a tenth of the steps."""
    later = [value for steps, values in curves for step, value in zip(steps, values) if step > 0.1 * steps[-1]]
    all_of_it = [value for _, values in curves for value in values]
    if len(later) < 2 or max(all_of_it) <= max(later) + 0.5 * (max(later) - min(later)):
        return
    low, high = min(later), max(later)
    axes.set_ylim(low - 0.08 * (high - low), high + 0.3 * (high - low))


# ---- one run -----------------------------------------------------------------------------------------------------

def loss_of_run(report, styles):
    run = report.runs[0]
    figure, axes = start("Loss")
    steps, values = run.series("loss")
    draw_curve(axes, steps, values, SERIES[0], label="training")
    val_steps, val = run.val_series("loss")
    axes.plot(val_steps, val, color=SERIES[1], marker="o", markersize=4, label="validation")
    limit_by_the_later(axes, [(steps, values)] + [(val_steps, val)] * bool(val_steps))
    legend(axes)
    return figure


def acceptance_of_run(report, styles):
    run = report.runs[0]
    figure, axes = start("Accepted tokens a block", unit="tokens")
    steps, values = run.series("accept_len")
    draw_curve(axes, steps, values, SERIES[0], label="drawn anchors (accept_len)")
    steps, values = run.val_series("accept_len_walk")
    if steps:
        axes.plot(steps, values, color=SERIES[1], marker="o", markersize=4, label="validation, as decoding would")
        best = report.summaries[run.label]
        if best["best_step"] is not None:
            axes.annotate(f"best {best['best_walk']:.3f}", (best["best_step"], best["best_walk"]), xytext=(0, 8),
                          textcoords="offset points", ha="right", color=SERIES[1], fontweight="bold")
    axes.margins(y=0.12)
    legend(axes)
    return figure


def slots_of_run(report, styles):
    run = report.runs[0]
    figure, axes = start("Which drafts agree with the target", unit="share of slots", steps=False, size=SMALL)
    chosen = [line for line in run.validations if run.slots(line)]
    lines = chosen or run.steps[-1:]
    picked = sorted({round(i * (len(lines) - 1) / 4) for i in range(5)}) if len(lines) > 1 else [0]
    for rank, i in enumerate(picked):
        points = run.by_draft(lines[i])
        if not points:
            continue
        late = (rank + 1) / len(picked)
        axes.plot([k for k, _ in points], [v for _, v in points], color=SERIES[0], alpha=0.2 + 0.8 * late,
                  marker="o", markersize=3.5, linewidth=1.2 + late, label=f"step {format_step(lines[i]['step'])}")
    axes.set_xlabel("draft")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    locate(axes.yaxis, 6, format_percent)
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def gradient_of_run(report, styles):
    figure, axes = start("Gradient norm, before clipping", size=SMALL)
    steps, values = report.runs[0].series("grad_norm")
    draw_curve(axes, steps, values, SERIES[3])
    axes.set_yscale("log" if values and min(values) > 0 else "linear")
    return figure


def rate_of_run(report, styles):
    figure, axes = start("Learning rate", size=SMALL)
    steps, values = report.runs[0].series("lr")
    axes.plot(*data.thin(steps, values), color=SERIES[7])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(format_plain))
    return figure


def time_of_run(report, styles):
    run = report.runs[0]
    figure, axes = start("Where a step's time goes", unit="a step")
    middles, parts = data.binned_parts(run)
    if len(middles) > 1 and parts:
        axes.stackplot(middles, list(parts.values()), colors=[PART_COLOURS[part] for part in parts], linewidth=0,
                       labels=[PART_NAMES[part] for part in parts])
    axes.yaxis.set_major_formatter(FuncFormatter(format_seconds))
    axes.set_ylim(bottom=0)
    axes.grid(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", handlelength=1, handleheight=1)
    return figure


def speed_of_run(report, styles):
    run = report.runs[0]
    figure, axes = start("Throughput", unit="tokens/s")
    draw_curve(axes, *run.series("tokens_per_second"), SERIES[0])
    axes.yaxis.set_major_formatter(FuncFormatter(format_count))
    axes.set_ylim(bottom=0)
    return figure


def share_of_run(report, styles):
    """What of the time and of the device is used."""
    run = report.runs[0]
    figure, axes = start("How much of time and device is used")
    for name, colour, label in (("wait_share", PART_COLOURS["wait_seconds"], "data wait, of the time"),
                                ("mfu", SERIES[0], "model FLOPs utilisation")):
        steps, values = run.series(name)
        if steps:
            draw_curve(axes, steps, values, colour, label=label)
    locate(axes.yaxis, 6, format_percent)
    axes.set_ylim(0, max(0.1, axes.get_ylim()[1]))
    legend(axes)
    return figure


def memory_of_run(report, styles):
    run = report.runs[0]
    cpu = run.execution.get("device") == "cpu"
    figure, axes = start("Memory of the process" if cpu else "Memory in use on the GPU", unit="most so far")
    steps, values = run.series("memory_bytes")
    axes.plot(*data.thin(steps, values), color=SERIES[0], label="in use")
    levels = data.memory_levels(run)
    for (words, level), dashes in zip(reversed(levels), DASHES[1:]):
        axes.axhline(level, color=MUTED, linewidth=1.2, linestyle=dashes, label=words)
    axes.set_ylim(0, 1.12 * max([*values, *(level for _, level in levels)]))
    locate(axes.yaxis, 6, format_bytes)
    legend(axes)
    return figure


# ---- several runs ------------------------------------------------------------------------------------------------

def curves_of_runs(report, styles, title, name, unit=None, validation=False, form=None, floor=False, size=SIZE,
                   log=False):
    figure, axes = start(title, unit=unit, size=size)
    curves = []
    for run in report.runs:
        steps, values = run.val_series(name) if validation else run.series(name)
        if not steps:
            continue
        curves.append((steps, values))
        best = run.label == report.best
        if validation:
            axes.plot(steps, values, marker="o", markersize=4.5 if best else 3, linewidth=2.4 if best else 1.5,
                      zorder=3 if best else 2, **styles.of(run.label))
        else:
            look = styles.of(run.label)
            draw_curve(axes, steps, values, look["color"], look["linestyle"], raw=len(report.runs) <= 3,
                       width=2.4 if best else 1.5)
    if name == "loss":
        limit_by_the_later(axes, curves)
    if log and all(value > 0 for _, values in curves for value in values):
        axes.set_yscale("log")
    if form:
        axes.yaxis.set_major_formatter(FuncFormatter(form))
    if floor:
        axes.set_ylim(bottom=0)
    styles.legend(axes)
    return figure


def slots_of_runs(report, styles):
    figure, axes = start("Which drafts agree with the target, at the end", unit="share of slots", steps=False)
    for run in report.runs:
        lines = [line for line in run.validations if run.slots(line)] or run.steps[-1:]
        points = run.by_draft(lines[-1]) if lines else []
        best = run.label == report.best
        axes.plot([k for k, _ in points], [v for _, v in points], marker="o", markersize=3,
                  linewidth=2.4 if best else 1.5, zorder=3 if best else 2, **styles.of(run.label))
    axes.set_xlabel("draft")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    locate(axes.yaxis, 6, format_percent)
    axes.set_ylim(bottom=0)
    styles.legend(axes)
    return figure


def bar_size(count):
    return SMALL[0], max(2.6, 1.3 + 0.27 * count)


def name_bars(axes, report, styles, runs):
    axes.set_yticks(range(len(runs)), [styles.brief(run) for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(styles.brief_of())
    axes.xaxis.set_major_locator(MaxNLocator(4))


def parts_of_runs(report, styles):
    figure, axes = start("Where a step's time goes", size=bar_size(len(report.runs)), steps=False)
    runs, used = report.runs[::-1], []
    left = [0.0] * len(runs)
    for part in (*data.PARTS, data.REST):
        seconds = [run.parts().get(part, 0.0) for run in runs]
        if not any(seconds):
            continue
        used.append(part)
        axes.barh(range(len(runs)), seconds, left=left, height=0.72, color=PART_COLOURS[part],
                  label=PART_NAMES[part])
        left = [a + b for a, b in zip(left, seconds)]
    name_bars(axes, report, styles, runs)
    axes.xaxis.set_major_formatter(FuncFormatter(format_seconds))
    axes.set_xlabel("a step")
    axes.grid(False)
    figure.legend(loc="outside lower center", ncols=3, handlelength=1, handleheight=1)
    return figure


def bars_of_runs(report, styles, title, name, form, unit):
    figure, axes = start(title, size=bar_size(len(report.runs)), steps=False)
    runs = report.runs[::-1]
    values = [report.summaries[run.label][name] or 0.0 for run in runs]
    bars = axes.barh(range(len(runs)), values, height=0.72, color=SERIES[0])
    axes.bar_label(bars, [form(value) for value in values], padding=4, color=INK, fontsize=8.5)
    name_bars(axes, report, styles, runs)
    axes.set_xlim(0, 1.3 * max(values) if max(values) > 0 else 1)
    locate(axes.xaxis, 4, form)
    axes.set_xlabel(unit)
    axes.grid(False)
    return figure


def pareto(report, styles, cost, title, form):
    figure, axes = start(title, unit=score_unit(report), steps=False)
    shown = [run for run in report.runs if report.score(run.label) is not None and
             report.summaries[run.label][cost] is not None]
    value = {run.label: report.summaries[run.label][report.score_name] for run in shown}
    front = [run for run in shown if run.label in report.fronts[cost]]
    front.sort(key=lambda run: report.summaries[run.label][cost])
    if len(front) > 1:
        axes.plot([report.summaries[run.label][cost] for run in front], [value[run.label] for run in front],
                  color=MUTED, linewidth=1.2, linestyle=DASHES[1], zorder=1, label="Pareto front")
    for run in shown:
        on = run in front
        axes.scatter(report.summaries[run.label][cost], value[run.label], s=130 if run.label == report.best else 42,
                     marker="*" if run.label == report.best else "o", zorder=3,
                     facecolor=styles.colours[run.label] if on else PAPER, edgecolor=styles.colours[run.label],
                     linewidth=1.4)
    for run in front:
        axes.annotate(styles.brief(run), (report.summaries[run.label][cost], value[run.label]), xytext=(9, -4),
                      textcoords="offset points", fontsize=8.5, color=INK)
    locate(axes.xaxis, 6, form)
    axes.set_xlabel({"seconds": "time of all steps", "memory_bytes": "memory"}[cost] +
                    (f"; points: {styles.brief_of()}" if styles.brief_of() else ""))
    axes.margins(x=0.18, y=0.16)
    legend(axes)
    return figure


def score_unit(report):
    return "best accept_len_walk, tokens" if report.scored else "loss, last tenth of the steps"


def heat(report, styles, title, name, form, cost):
    rows_key, columns_key = report.plane()
    rows, columns = report.axis(rows_key)[::-1], report.axis(columns_key)
    cells = report.cells(rows_key, columns_key)
    missing = {(values[rows_key], values[columns_key]): state for values, state, _ in report.missing.values()}
    known = {at: report.summaries[label][name] for at, label in cells.items()
             if report.summaries[label][name] is not None}
    figure, axes = start(title, size=(SMALL[0], max(2.4, 1.2 + 0.52 * len(rows))), steps=False)
    low, high = data.colour_range(known.values())
    # Of equals the best run, and of what has ended: with the score's own map that is report.best.
    best = max((at for at in known if cells[at] in report.compared), default=None,
               key=lambda at: (-known[at] if cost else known[at], report.rank(cells[at])))
    colours = COST if cost else HEAT
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            value = known.get((row, column))
            if value is None:
                draw_hole(axes, x, y, missing.get((row, column), ""))
                continue
            level = (value - low) / (high - low) if high > low else 0.5
            colour = colours(level)
            axes.add_patch(plt.Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, color=colour, linewidth=0))
            axes.text(x + 0.5, y + 0.5, form(value), ha="center", va="center", fontsize=9,
                      color="#ffffff" if is_dark(colour) else "#101828",
                      fontweight="bold" if (row, column) == best else "normal")
            if (row, column) == best:
                axes.add_patch(plt.Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, fill=False, edgecolor=INK,
                                             linewidth=1.8))
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
    axes.set_yticks([y + 0.5 for y in range(len(rows))], rows)
    axes.set_xlabel(report.short(columns_key))
    axes.set_ylabel(report.short(rows_key))
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    return figure


def is_dark(colour):
    """Whether white is read better on it: by relative luminance, as WCAG defines it."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2


def draw_hole(axes, x, y, state):
    axes.add_patch(plt.Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor="none", edgecolor=GRID, hatch="////",
                                 linewidth=1))
    if state:
        axes.text(x + 0.5, y + 0.5, state.replace("_", " "), ha="center", va="center", fontsize=8, color=MUTED)


def effect(report, styles, name, title, form):
    """Of the only key in which runs differ."""
    key = report.keys[0]
    figure, axes = start(title, size=SMALL, steps=False)
    points = [(value, run) for value in report.axis(key) for run in report.runs if run.values[key] == value]
    at = [report.axis(key).index(value) for value, _ in points]
    values = [report.summaries[run.label][name] for _, run in points]
    kept = [(x, value) for x, value in zip(at, values) if value is not None]
    axes.plot([x for x, _ in kept], [value for _, value in kept], color=SERIES[0], marker="o")
    axes.set_xticks(range(len(report.axis(key))), report.axis(key))
    axes.set_xlabel(report.short(key))
    axes.yaxis.set_major_formatter(FuncFormatter(form))
    axes.margins(x=0.08, y=0.15)
    return figure


# ---- the list ----------------------------------------------------------------------------------------------------

def figures_of(report):
    """Figures in the order of the page."""
    return one_run(report.runs[0]) if len(report.runs) == 1 else several_runs(report)


def one_run(run):
    """Those whose numbers are there."""
    found = [Figure("loss", "learning", loss_of_run), Figure("acceptance", "learning", acceptance_of_run),
            Figure("slots", "learning", slots_of_run, 4), Figure("gradient", "learning", gradient_of_run, 4),
            Figure("lr", "learning", rate_of_run, 4), Figure("time", "speed", time_of_run),
            Figure("throughput", "speed", speed_of_run), Figure("shares", "speed", share_of_run),
            Figure("memory", "speed", memory_of_run)]
    needs = {"gradient": "grad_norm", "lr": "lr", "time": "seconds", "throughput": "tokens_per_second",
             "shares": "wait_share", "memory": "memory_bytes"}
    return [figure for figure in found if figure.name not in needs or run.series(needs[figure.name])[0]]


def several_runs(report):
    def curves(*names, **options):
        return lambda report, styles: curves_of_runs(report, styles, *names, **options)

    found = comparison(report)
    rate, unit = ("block_rows_per_second", "block rows/s") if report.one_kind() else ("tokens_per_second", "tokens/s")
    if report.scored:
        found.append(Figure("acceptance", "learning",
                            curves("Validation: accepted tokens a block, as decoding would (accept_len_walk)",
                                   "accept_len_walk", unit="tokens", validation=True, size=WIDE), 12))
    found += [
        Figure("accept_len", "learning", curves("Training: accepted tokens a block (accept_len)", "accept_len",
                                                unit="tokens")),
        Figure("loss", "learning", curves("Training loss", "loss")),
        Figure("val_loss", "learning", curves("Validation loss", "loss", validation=True)),
        Figure("slots", "learning", slots_of_runs),
        Figure("gradient", "learning", curves("Gradient norm, before clipping", "grad_norm", log=True)),
        Figure("lr", "learning", curves("Learning rate", "lr", floor=True, form=format_plain)),
        Figure("throughput", "speed", lambda report, styles: bars_of_runs(
            report, styles, "Throughput", rate, format_count, unit), 4),
        Figure("time", "speed", parts_of_runs, 4),
        Figure("memory", "speed", lambda report, styles: bars_of_runs(
            report, styles, "Memory", "memory_bytes", format_bytes, "most in use"), 4),
    ]
    if not any(run.val_series("loss")[0] for run in report.runs):
        found = [figure for figure in found if figure.name != "val_loss"]
    return found


def comparison(report):
    what = [(report.score_name, "accept_len_walk, best" if report.scored else "Loss", lambda value, _=None:
             f"{value:.3f}", not report.scored),
            ("seconds", "Time of all steps", format_seconds, True),
            ("memory_bytes", "Memory", format_bytes, True)]
    found = []
    for name, title, form, cost in what:
        if not any(report.summaries[run.label][name] is not None for run in report.runs):
            continue
        if report.plane():
            plot = (lambda name, title, form, cost: lambda report, styles: heat(
                report, styles, title, name, form, cost))(name, title, form, cost)
        elif len(report.keys) == 1:
            plot = (lambda name, title, form: lambda report, styles: effect(
                report, styles, name, title, form))(name, title, form)
        else:
            continue
        found.append(Figure("compare-" + name, "best", plot, 4))
    for cost, title, form in (("seconds", "Acceptance against time", format_seconds),
                              ("memory_bytes", "Acceptance against memory", format_close_bytes)):
        if report.fronts[cost]:
            plot = (lambda cost, title, form: lambda report, styles: pareto(report, styles, cost, title, form))(
                cost, title if report.scored else title.replace("Acceptance", "Loss"), form)
            found.append(Figure("pareto-" + cost, "best", plot))
    return found


def draw(report):
    """[(Figure, matplotlib figure)]; close them with plt.close."""
    styles = Styles(report)
    with matplotlib.rc_context(STYLE):
        return [(figure, figure.plot(report, styles)) for figure in figures_of(report)]


def save(drawn, path, kind):
    with matplotlib.rc_context(STYLE):
        drawn.savefig(path, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)


def close(drawn):
    plt.close(drawn)
