"""What a report says of runs: their lines of metrics.jsonl, what they differ in, and numbers made from them.

Reads run folders and folders of `dtrain sweep` (docs/file-formats.md). Draws nothing, needs nothing but Python.
"""

import itertools
import json
import math
import os
import re
import statistics

# Parts of a step's time, in the order in which they are drawn, and what is left of it.
PARTS = ("wait_seconds", "copy_seconds", "forward_seconds", "loss_seconds", "backward_seconds", "optimizer_seconds",
         "exchange_seconds")
REST = "rest_seconds"
MOST_KEYS = 3  # that runs of no sweep are named by
# Keys that do not make a run another one.
PLACES = ("run.dir", "run.device", "log.", "checkpoint.", "parallel.", "kernels.algorithms", "data.readers",
          "data.prefetch_rows", "data.spool", "data.check_crc", "memory.limit")


class ReportError(Exception):
    """A fault of what the user gave, in words fit to print."""


# ---- reading -----------------------------------------------------------------------------------------------------

def read_config(path):
    """{"section.key": value} of a config.yaml as a run writes it: two levels, a key a line, values as in JSON."""
    found, section = {}, ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            head = re.match(r"(\w+):\s*$", line)
            entry = re.match(r"  (\w+): (.*)$", line)
            if head:
                section = head.group(1)
            elif entry:
                try:
                    found[f"{section}.{entry.group(1)}"] = json.loads(entry.group(2))
                except ValueError:
                    found[f"{section}.{entry.group(1)}"] = entry.group(2)
    return found


def read_json(path):
    """The object in a file; {} where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ReportError(f"{path}: not JSON: {error}") from error


def read_metrics(path):
    """(lines, notes): the objects of a metrics.jsonl. A run may be writing its last line; others that are not
    JSON are left out, and noted."""
    lines, notes = [], []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                    raise ValueError("no step in it")
            except ValueError:
                if text.endswith("\n"):
                    notes.append(f"{path}, line {number} is not a line of metrics: left out")
                else:
                    notes.append(f"{path}: the last line is not whole, as when a run is writing it or was killed: "
                                 "left out")
                continue
            lines.append(line)
    return lines, notes


def known(value):
    """A value as a float; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def number(line, name):
    """A member as a float; None where it is missing or no number."""
    return known(line.get(name))


def agreement(line):
    """Agreement slot by slot of a validation's line, or of a step's; None where it is not known."""
    acc = line.get("val_acc", line.get("acc"))
    return [known(value) for value in acc] if isinstance(acc, list) else []


# ---- a run -------------------------------------------------------------------------------------------------------

class Run:
    """A run folder. values: of the keys in which runs differ, {key: text}. state: of a sweep's point that has not
    ended; None otherwise."""

    def __init__(self, folder, label):
        self.folder, self.label, self.values, self.state = folder, label, {}, None
        path = os.path.join(folder, "metrics.jsonl")
        if not os.path.isdir(folder):
            raise ReportError(f"{folder}: there is no such folder")
        if not os.path.exists(path):
            raise ReportError(f"{folder}: no metrics.jsonl in it: it is no run's folder, or the run has not begun its "
                              "first step")
        self.lines, self.notes = read_metrics(path)
        self.steps = [line for line in self.lines if "val_loss" not in line]
        self.validations = [line for line in self.lines if "val_loss" in line]
        if not self.lines:
            raise ReportError(f"{path}: no whole line yet: no step has ended")
        config = os.path.join(folder, "config.yaml")
        self.config = read_config(config) if os.path.exists(config) else {}
        self.execution = read_json(os.path.join(folder, "execution.json"))

    def series(self, name):
        """([step], [value]) of a member of the steps, where it is a number."""
        pairs = [(line["step"], number(line, name)) for line in self.steps]
        return ([step for step, value in pairs if value is not None],
                [value for _, value in pairs if value is not None])

    def val_series(self, name):
        """The same of validations; name without val_."""
        pairs = [(line["step"], number(line, "val_" + name)) for line in self.validations]
        return ([step for step, value in pairs if value is not None],
                [value for _, value in pairs if value is not None])

    def slots(self, validation):
        """[(slot, share that agrees)] of a validation's line, or of a step's."""
        return [(k, value) for k, value in enumerate(agreement(validation)) if value is not None]

    def first_draft(self):
        """Which draft slot 0 is: the first one of an EAGLE-3 chain and of drafters that draft from the anchor; 0: it is the
        anchor itself."""
        return int(self.config.get("drafter.kind") == "eagle3" or self.config.get("drafter.predict_from_anchor") is True)

    def by_draft(self, line):
        """[(draft, share that agrees)], drafts from 1 on."""
        return [(k + self.first_draft(), value) for k, value in self.slots(line)]

    def most_drafts(self):
        """Of a block."""
        return self.block_size() - 1 + self.first_draft()

    def block_size(self):
        return len(agreement(self.lines[-1]))

    def parts(self, lines=None):
        """{part: seconds a step, on average}, with REST; parts that are nothing anywhere are left out."""
        lines = [line for line in (self.steps if lines is None else lines) if number(line, "seconds")]
        if not lines:
            return {}
        mean = {part: sum(number(line, part) or 0.0 for line in lines) / len(lines) for part in PARTS}
        whole = sum(number(line, "seconds") for line in lines) / len(lines)
        mean[REST] = max(0.0, whole - sum(mean.values()))
        return {part: value for part, value in mean.items() if value > 0.0}


def mean_of_last_tenth(values):
    if not values:
        return None
    last = values[len(values) - (len(values) + 9) // 10:]
    found = [value for value in last if value is not None]
    return sum(found) / len(found) if found else None


def ratio(part, whole):
    return part / whole if whole else None


def summary(run):
    """Numbers of a run, by name; None: not known. The same as in the table of `dtrain sweep`."""
    def total(name):
        return sum(number(line, name) or 0.0 for line in run.steps)

    scored = [line for line in run.validations if line["step"] > 0 and number(line, "val_accept_len_walk") is not None]
    best = max(scored, key=lambda line: line["val_accept_len_walk"], default=None)  # the first of equals
    last = run.validations[-1] if run.validations else {}
    seconds, block_rows = total("seconds"), total("anchors") * run.block_size()
    memory = [number(line, "memory_bytes") for line in run.steps if number(line, "memory_bytes")]
    flops = total("flops")
    rated = [line for line in run.steps if number(line, "mfu") and number(line, "flops") and number(line, "seconds")]
    peak_seconds = sum(line["flops"] / line["mfu"] for line in rated)  # operations that the device could have done
    return {
        "step": run.steps[-1]["step"] if run.steps else 0,
        "steps_wanted": wanted_steps(run),
        "best_walk": number(best, "val_accept_len_walk") if best else None,
        "best_step": best["step"] if best else None,
        "first_walk": number(run.validations[0], "val_accept_len_walk") if run.validations else None,
        "walk": number(last, "val_accept_len_walk"),
        **{f"walk_{drafts}": number(last, f"val_accept_len_walk_{drafts}") for drafts in drafts_of(last)},
        "overlap": number(last, "val_overlap"),
        "val_loss": number(last, "val_loss"),
        "loss": mean_of_last_tenth([number(line, "loss") for line in run.steps]),
        "accept_len": mean_of_last_tenth([number(line, "accept_len") for line in run.steps]),
        "seconds": seconds if run.steps else None,
        "val_seconds": sum(number(line, "val_seconds") or 0.0 for line in run.validations),
        "save_seconds": total("save_seconds"),
        "step_seconds": ratio(seconds, len(run.steps)),
        "tokens_per_second": ratio(total("tokens"), seconds),
        "block_rows_per_second": ratio(block_rows, seconds),
        "wait_share": ratio(total("wait_seconds") + total("copy_seconds"), seconds),
        "mfu": ratio(sum(line["flops"] for line in rated), peak_seconds),
        "flops": flops or None,
        "memory_bytes": max(memory, default=None),
        "skipped": sum(line.get("skipped") is True for line in run.steps),
    }


def memory_levels(run):
    """What a run's memory is held against: pairs of words and bytes. On a CPU the plan is of what comes on top of the
    program and its libraries; on a GPU it has the context, and is of the whole."""
    last = run.steps[-1] if run.steps else {}
    begin, planned = number(last, "begin_bytes"), number(last, "planned_bytes")
    on_top = run.execution.get("device") == "cpu" and begin
    found = [("when the run began", begin)] if begin else []
    if planned:
        found.append(("planned, on top of that" if on_top else "planned", planned + (begin if on_top else 0)))
    return found


def drafts_of(line):
    """The numbers of drafts that a validation has accept_len_walk for."""
    found = [re.fullmatch(r"val_accept_len_walk_(\d+)", name) for name in line]
    return sorted(int(match.group(1)) for match in found if match)


def wanted_steps(run):
    """How many steps it takes in all, as far as its config says; None: that follows from the data."""
    most = run.config.get("run.max_steps")
    return most if isinstance(most, int) and most > 0 else None


# ---- several of them ---------------------------------------------------------------------------------------------

def text_of(value):
    return value if isinstance(value, str) else json.dumps(value)


def value_of(run, key):
    """A key's value as text. run.max_steps of 0 says nothing of a run, the steps that it took do."""
    if key == "run.max_steps" and run.config.get(key) == 0 and run.steps:
        return text_of(run.steps[-1]["step"])
    return text_of(run.config.get(key))


def differing_keys(runs):
    """Keys of the configs in which the runs differ, in the configs' order."""
    keys = [key for key in runs[0].config if not key.startswith(PLACES)]
    return [key for key in keys
            if len({value_of(run, key) for run in runs if key in run.config}) > 1]


def sort_value(text):
    """Values in their order: numbers by size, others by text."""
    try:
        return (0, float(text), "")
    except ValueError:
        return (1, 0.0, text)


# How much less than a better run one has to take to be on a front: a process's memory differs from start to start.
# As in `dtrain sweep`.
LESS = {"seconds": 1.0, "memory_bytes": 0.99}


def on_front(points, cost):
    """Of {name: (score, costs)}: each one that takes less than all better ones that are on the front. Not than any
    better one: of many that take little more each, the front would keep the last alone."""
    ranked = sorted(((-score, costs[cost]) for score, costs in points.values()
                     if score is not None and costs[cost] is not None))
    front, least = set(), math.inf
    for rank in ranked:
        if rank[1] < LESS[cost] * least:
            front.add(rank)
            least = rank[1]
    return [name for name, (score, costs) in points.items() if score is not None and (-score, costs[cost]) in front]


def colour_range(values):
    """(low, high) of a heat map's colours, about the values: at least 5 % of the largest apart, so that what is nearly
    the same looks so."""
    low, high = min(values), max(values)
    wide = max(high - low, 0.05 * max(abs(low), abs(high)))
    middle = (low + high) / 2
    return middle - wide / 2, middle + wide / 2


class Report:
    """runs; keys in which they differ; missing: points of a sweep without numbers, {label: (values, state, reason)};
    summaries and marks by label."""

    def __init__(self, title, runs, keys, missing=None, scored_by="best_walk"):
        self.title, self.runs, self.keys, self.missing = title, runs, keys, missing or {}
        self.summaries = {run.label: summary(run) for run in runs}
        self.scored = any(self.summaries[run.label]["best_walk"] is not None for run in runs)
        self.score_name = scored_by if self.scored else "loss"
        # What has not ended is not compared with what has.
        ended = [run for run in runs if run.state is None] or runs
        points = {run.label: (self.score(run.label), self.summaries[run.label]) for run in ended}
        self.compared = set(points)
        self.fronts = {cost: on_front(points, cost) for cost in ("seconds", "memory_bytes")}
        self.best = max((label for label in points if points[label][0] is not None), key=self.rank, default=None)

    def short(self, key):
        """A key without its section where that is unique among all keys, as on the command line."""
        name = key.split(".")[-1]
        known = {other for run in self.runs for other in run.config} | set(self.keys)
        return name if [other.split(".")[-1] for other in known].count(name) == 1 else key

    def one_kind(self):
        """Whether all drafters are of one kind: rows of a block are other work in another one."""
        return len({run.config.get("drafter.kind") for run in self.runs}) == 1

    def score(self, label):
        """The larger the better."""
        value = self.summaries[label][self.score_name]
        return value if self.scored or value is None else -value

    def rank(self, label):
        """The larger the better, as `dtrain sweep` ranks its points: of equals the one that took less time, then the
        first of them."""
        score, seconds = self.score(label), self.summaries[label]["seconds"]
        return (label in self.compared, -math.inf if score is None else score, -math.inf if seconds is None else -seconds)

    @property
    def notes(self):
        return [note for run in self.runs for note in run.notes]

    def drafts(self):
        """Numbers of drafts that all runs are scored at."""
        sets = [set(drafts_of(run.validations[-1])) if run.validations else set() for run in self.runs]
        return sorted(set.intersection(*sets))

    def axis(self, key):
        """All values of a key, ordered."""
        values = {run.values[key] for run in self.runs} | {point[0][key] for point in self.missing.values()}
        return sorted(values, key=sort_value)

    def plane(self):
        """The two keys of heat maps: max_anchors and block_size where they differ, else those of most values; None
        when fewer than two keys differ, or the others make several runs of one cell."""
        wanted = [key for name in ("max_anchors", "block_size") for key in self.keys if key.endswith("." + name)]
        others = sorted((key for key in self.keys if key not in wanted), key=lambda key: -len(self.axis(key)))
        keys = (wanted + others)[:2]
        if len(keys) < 2 or len(self.cells(*keys)) < 3:
            return None
        return keys

    def cells(self, row_key, column_key):
        """{(row value, column value): label of the best run there}"""
        cells = {}
        for run in self.runs:
            at = (run.values[row_key], run.values[column_key])
            if at not in cells or self.rank(run.label) > self.rank(cells[at]):
                cells[at] = run.label
        return cells


def open_sweep(folder):
    """A folder of `dtrain sweep`: points that have metrics, and why the others have none."""
    state, table = (read_json(os.path.join(folder, name)) for name in ("sweep.json", "table.json"))
    try:
        keys, points = points_of(state)
        table = {point["point"]: point for point in table.get("points", [])}
        named = [(point["name"], point, values) for point, values in points]
    except (AttributeError, KeyError, TypeError) as error:
        raise ReportError(f"{folder}: sweep.json or table.json is not what dtrain sweep writes") from error
    runs, missing = [], {}
    for name, point, values in named:
        try:
            run = Run(os.path.join(folder, name), name)
        except ReportError:
            reason = table.get(name, {}).get("reason") or point.get("reason") or ""
            missing[name] = (values, point.get("state", "waiting"), reason)
            continue
        run.values = values
        if point.get("state") not in (None, "done"):
            run.state = point["state"]
            run.notes.append(f"{name}: {point['state']}; the numbers are those so far")
        runs.append(run)
    if not runs:
        raise ReportError(f"{folder}: no point of the sweep has metrics yet")
    return Report(os.path.basename(os.path.abspath(folder)), runs, keys, missing)


def points_of(state):
    """(keys, [(point, {key: value})]) of a sweep.json: its points stand in the order of the grid's combinations, the last
    key's value changing first. Their names hold the values, too, but not always whole."""
    axes = state.get("grid", [])
    keys = [axis["key"] for axis in axes]
    combinations = itertools.product(*(axis["values"] for axis in axes))
    return keys, [(point, dict(zip(keys, values))) for point, values in zip(state.get("points", []), combinations)]


def labels_of(folders):
    """Short names that tell folders apart: the last part of their paths, more of it where two are equal."""
    paths = [os.path.normpath(os.path.abspath(folder)).split(os.sep) for folder in folders]
    for depth in range(1, max(len(path) for path in paths) + 1):
        labels = ["/".join(path[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise ReportError("the same folder is given twice")


def open_report(folders):
    """A report of one run folder, of several, or of one sweep's folder."""
    if not folders:
        raise ReportError("no folder is given")
    for folder in folders:
        if not os.path.isdir(folder):
            raise ReportError(f"{folder}: there is no such folder")
    sweeps = [folder for folder in folders if os.path.exists(os.path.join(folder, "sweep.json"))]
    if sweeps and len(folders) > 1:
        raise ReportError(f"{sweeps[0]}: a sweep's folder stands alone; for a choice of its points give their folders")
    if sweeps:
        return open_sweep(sweeps[0])
    runs, notes = open_runs(folders)
    keys = differing_keys(runs) if len(runs) > 1 and all(run.config for run in runs) else []
    if len(keys) > MOST_KEYS:
        notes.append(f"The runs differ in {len(keys)} keys and go by their folders' names: {', '.join(keys)}")
        keys = []
    for run in runs:
        run.values = {key: value_of(run, key) for key in keys}
    title = runs[0].label if len(folders) == 1 else f"{len(runs)} runs"
    runs[0].notes += notes
    return Report(title, runs, keys)


def open_runs(folders):
    """(runs, notes): of several, those that have no numbers yet are noted and left out."""
    runs, faults = [], []
    for folder, label in zip(folders, labels_of(folders)):
        try:
            runs.append(Run(folder, label))
        except ReportError as error:
            faults.append(f"{error}: left out")
            if len(folders) == 1:
                raise
    if not runs:
        raise ReportError("\n".join(faults))
    return runs, faults


# ---- for drawing -------------------------------------------------------------------------------------------------

def smooth(values, width):
    """Means over up to `width` values around each one."""
    if width <= 1:
        return list(values)
    sums, result, half = [0.0], [], width // 2
    for value in values:
        sums.append(sums[-1] + value)
    for i in range(len(values)):
        begin, end = max(0, i - half), min(len(values), i + half + 1)
        result.append((sums[end] - sums[begin]) / (end - begin))
    return result


def smoothing(count):
    """Over how many values a curve of so many is averaged: a fiftieth of it."""
    return max(1, count // 50)


def thin(steps, values, most=1000):
    """At most so many points, evenly spaced, the last one always."""
    if len(steps) <= most:
        return list(steps), list(values)
    picked = sorted({round(i * (len(steps) - 1) / (most - 1)) for i in range(most)})
    return [steps[i] for i in picked], [values[i] for i in picked]


def binned_parts(run, bins=60):
    """([step in the middle], {part: [seconds a step]}) over equal stretches of the run."""
    count = min(bins, len(run.steps))
    edges = [round(i * len(run.steps) / count) for i in range(count + 1)] if count else [0]
    middles, found = [], []
    for begin, end in zip(edges, edges[1:]):
        lines = run.steps[begin:end]
        middles.append(statistics.fmean(line["step"] for line in lines))
        found.append(run.parts(lines))
    names = [part for part in (*PARTS, REST) if any(part in parts for parts in found)]
    return middles, {part: [parts.get(part, 0.0) for parts in found] for part in names}


CURVES = ("loss", "accept_len", "lr", "grad_norm", "clip_factor", "tokens_per_second", "block_rows_per_second",
          "wait_share", "mfu", "memory_bytes")
VAL_CURVES = ("accept_len_walk", "accept_len", "loss", "overlap")


def as_json(report):
    """Everything that the figures show, as one object: it is embedded in the page."""
    def curve(pair):
        steps, values = thin(*pair)
        return {"step": steps, "value": values}

    return {
        "title": report.title,
        "keys": report.keys,
        "best": report.best,
        "front_time": report.fronts["seconds"],
        "front_memory": report.fronts["memory_bytes"],
        "missing": {label: {"values": point[0], "state": point[1], "reason": point[2]}
                    for label, point in report.missing.items()},
        "runs": [{
            "label": run.label,
            "folder": run.folder,
            "values": run.values,
            "summary": report.summaries[run.label],
            "curves": {name: curve(run.series(name)) for name in CURVES if run.series(name)[0]},
            "validations": {name: curve(run.val_series(name)) for name in VAL_CURVES if run.val_series(name)[0]},
            "slots": {str(line["step"]): agreement(line) for line in run.validations if agreement(line)},
            "parts": run.parts(),
        } for run in report.runs],
    }
