"""tools/report.py: its numbers are those of metrics.jsonl and of `dtrain sweep`, its figures and page show them, and
what it refuses it says in words.

    DTRAIN=build/dtrain python -m unittest discover -s tools/tests    (figures need matplotlib, real runs DTRAIN)
"""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [TOOLS, os.path.dirname(os.path.abspath(__file__))]

import report as tool  # noqa: E402
from dtrain_tools import report_data as data  # noqa: E402

try:
    import matplotlib
    if matplotlib.__version_info__[:2] < tool.OLDEST:
        raise ImportError("too old")
    from dtrain_tools import report_figures as figures
    from dtrain_tools import report_page
except ImportError:
    figures = None

DTRAIN = os.environ.get("DTRAIN")
needs_matplotlib = unittest.skipIf(figures is None, "needs matplotlib 3.7 or newer")


def step_line(step, **more):
    return {"step": step, "epoch": 0, "loss": 10.0 / step, "accept_len": 1.0 + 0.01 * step, "acc": [None, 0.5, 0.25],
            "lr": 1e-3, "grad_norm": 2.0, "clip_factor": 0.5, "skipped": False, "tokens": 100, "anchors": 10,
            "seconds": 2.0, "wait_seconds": 0.25, "copy_seconds": 0.25, "forward_seconds": 0.5, "loss_seconds": 0.25,
            "backward_seconds": 0.5, "optimizer_seconds": 0.0, "tokens_per_second": 50.0, "wait_share": 0.25,
            "memory_bytes": 1000 + step, "planned_bytes": 900, **more}


def val_line(step, walk, **more):
    return {"step": step, "epoch": 0, "val_accept_len_walk": walk, "val_accept_len_walk_1": walk - 0.25,
            "val_loss": 5.0 - 0.1 * step, "val_overlap": 0.5, "val_acc": [None, 0.75, step / 100], "val_seconds": 1.5,
            **more}


class Folders(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def run_folder(self, name, lines, tail="", **keys):
        os.makedirs(self.path(name))
        with open(self.path(name, "metrics.jsonl"), "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines) + tail)
        sections = {}
        for key, value in {"run.dir": name, "run.max_steps": 40, "anchors.max_anchors": 64, **keys}.items():
            section, entry = key.split(".")
            sections.setdefault(section, []).append(f"  {entry}: {json.dumps(value)}\n")
        with open(self.path(name, "config.yaml"), "w", encoding="utf-8") as file:
            file.write("".join(f"{section}:\n" + "".join(entries) + "  # of: not given\n"
                               for section, entries in sections.items()))
        return self.path(name)

    def usual(self, name="run", gain=0.0, **keys):
        lines = [val_line(0, 1.0)]
        for step in range(1, 41):
            lines.append(step_line(step))
            if step % 10 == 0:
                lines.append(val_line(step, 1.0 + gain + (0.5 if step == 30 else 0.3)))
        return self.run_folder(name, lines, **keys)

    def fails(self, words, *arguments):
        with self.assertRaises(data.ReportError) as caught:
            data.open_report(list(arguments))
        self.assertIn(words, str(caught.exception))


class Reading(Folders):
    def test_series_are_the_lines(self):
        run = data.open_report([self.usual()]).runs[0]
        self.assertEqual(run.series("loss"), (list(range(1, 41)), [10.0 / step for step in range(1, 41)]))
        self.assertEqual(run.val_series("accept_len_walk"), ([0, 10, 20, 30, 40], [1.0, 1.3, 1.3, 1.5, 1.3]))
        self.assertEqual(run.slots(run.validations[-1]), [(1, 0.75), (2, 0.4)])
        self.assertEqual(run.by_draft(run.validations[-1]), [(1, 0.75), (2, 0.4)])
        run.config["drafter.kind"] = "eagle3"  # whose slot 0 is a draft
        self.assertEqual(run.by_draft(run.validations[-1]), [(2, 0.75), (3, 0.4)])
        self.assertEqual(run.config["anchors.max_anchors"], 64)

    def test_what_is_null_is_left_out(self):
        run = data.open_report([self.run_folder("r", [step_line(1), step_line(2, loss=None), step_line(3)])]).runs[0]
        self.assertEqual(run.series("loss"), ([1, 3], [10.0, 10.0 / 3]))
        self.assertEqual(run.series("never_written"), ([], []))

    def test_summary(self):
        report = data.open_report([self.usual()])
        found = report.summaries["run"]
        self.assertEqual((found["best_walk"], found["best_step"], found["walk"], found["first_walk"]), (1.5, 30, 1.3, 1.0))
        self.assertEqual(found["walk_1"], 1.05)
        self.assertAlmostEqual(found["loss"], sum(10.0 / step for step in (37, 38, 39, 40)) / 4)
        self.assertEqual((found["seconds"], found["val_seconds"], found["step"]), (80.0, 7.5, 40))
        self.assertEqual((found["tokens_per_second"], found["block_rows_per_second"]), (50.0, 15.0))
        self.assertEqual((found["wait_share"], found["memory_bytes"], found["mfu"]), (0.25, 1040.0, None))

    def test_utilisation_is_of_the_whole_run(self):
        lines = [step_line(1, flops=4.0, mfu=0.5), step_line(2, flops=2.0, mfu=0.1)]
        report = data.open_report([self.run_folder("r", lines)])
        self.assertAlmostEqual(report.summaries["r"]["mfu"], 6.0 / (8.0 + 20.0))

    def test_memory_is_held_against_the_plan(self):
        run = data.open_report([self.run_folder("r", [step_line(1, begin_bytes=700)])]).runs[0]
        run.execution["device"] = "cpu"
        self.assertEqual(data.memory_levels(run), [("when the run began", 700.0), ("planned, on top of that", 1600.0)])
        run.execution["device"] = "cuda"
        self.assertEqual(data.memory_levels(run), [("when the run began", 700.0), ("planned", 900.0)])
        before = data.open_report([self.run_folder("before", [step_line(1)])]).runs[0]  # by a version without it
        before.execution["device"] = "cpu"
        self.assertEqual(data.memory_levels(before), [("planned", 900.0)])

    def test_parts_add_up_to_a_step(self):
        run = data.open_report([self.usual()]).runs[0]
        parts = run.parts()
        self.assertEqual(parts, {"wait_seconds": 0.25, "copy_seconds": 0.25, "forward_seconds": 0.5,
                                 "loss_seconds": 0.25, "backward_seconds": 0.5, data.REST: 0.25})
        middles, binned = data.binned_parts(run, bins=4)
        self.assertEqual(middles, [5.5, 15.5, 25.5, 35.5])
        self.assertEqual(binned["forward_seconds"], [0.5] * 4)

    def test_a_line_that_is_being_written(self):
        report = data.open_report([self.run_folder("r", [step_line(1)], tail='{"step": 2, "lo')])
        self.assertEqual(report.runs[0].series("loss"), ([1], [10.0]))
        self.assertIn("the last line is not whole", report.notes[0])

    def test_a_line_that_is_broken(self):
        folder = self.run_folder("r", [step_line(1)], tail="\0\0 rubbish\n" + json.dumps(step_line(2)) + "\n")
        report = data.open_report([folder])
        self.assertEqual(report.runs[0].series("loss")[0], [1, 2])
        self.assertIn("line 2 is not a line of metrics", report.notes[0])

    def test_members_that_are_no_numbers(self):
        folder = self.run_folder("odd", [step_line(1, mfu=0.5, loss="x", acc=5), step_line(2, seconds=math.nan, mfu=0.5),
                                         val_line(2, 1.5, val_acc=[None, math.nan, 1.0], val_loss=math.inf)])
        report = data.open_report([folder])
        self.assertEqual(report.runs[0].slots(report.runs[0].validations[0]), [(2, 1.0)])
        self.assertEqual([report.summaries["odd"][name] for name in ("mfu", "val_loss", "loss")], [None, None, 5.0])
        json.dumps(data.as_json(report), allow_nan=False)

    def test_refusals(self):
        self.fails("nowhere: there is no such folder", self.path("nowhere"))
        os.makedirs(self.path("empty"))
        self.fails("no metrics.jsonl in it", self.path("empty"))
        self.fails("no whole line yet", self.run_folder("begun", [], tail='{"step"'))
        self.fails("is given twice", self.usual("a"), self.path("a"))

    def test_one_of_several_has_no_step_yet(self):
        report = data.open_report([self.usual("a"), self.run_folder("b", []), self.usual("c")])
        self.assertEqual([run.label for run in report.runs], ["a", "c"])
        self.assertRegex(report.notes[0], "b/metrics.jsonl: no whole line yet: no step has ended: left out")

    def test_smooth_and_thin(self):
        self.assertEqual(data.smooth([1.0, 2.0, 6.0], 3), [1.5, 3.0, 4.0])
        self.assertEqual(data.smooth([1.0, 2.0], 1), [1.0, 2.0])
        steps, values = data.thin(list(range(5000)), [float(i) for i in range(5000)], 100)
        self.assertEqual((len(steps), steps[0], steps[-1]), (100, 0, 4999))
        self.assertEqual(values, [float(step) for step in steps])


class Comparing(Folders):
    def grid(self):
        folders = []
        for anchors in (32, 128):
            for size in (4, 16):
                gain = 0.1 * (anchors == 128) + 0.05 * (size == 16)
                folders.append(self.usual(f"a{anchors}-b{size}", gain, **{"anchors.max_anchors": anchors,
                                                                           "drafter.block_size": size}))
        return data.open_report(folders)

    def test_keys_in_which_runs_differ(self):
        report = self.grid()
        self.assertEqual(report.keys, ["anchors.max_anchors", "drafter.block_size"])
        self.assertEqual(report.axis("anchors.max_anchors"), ["32", "128"])
        self.assertEqual(report.plane(), ["anchors.max_anchors", "drafter.block_size"])
        self.assertEqual(report.cells(*report.plane())[("128", "4")], "a128-b4")
        self.assertEqual(report.best, "a128-b16")

    def test_runs_of_many_differences_go_by_their_folders(self):
        names = ("anchors.max_anchors", "drafter.block_size", "run.max_steps", "validation.every")
        folders = [self.usual("a", **{name: 32 for name in names}), self.usual("b", **{name: 64 for name in names})]
        report = data.open_report(folders)
        self.assertEqual(report.keys, [])
        self.assertEqual([run.label for run in report.runs], ["a", "b"])
        if figures is not None:
            self.assertEqual([figures.Styles(report).name(run) for run in report.runs], ["a", "b"])
        self.assertTrue(any("differ in 4 keys" in note and all(name in note for name in names) for note in report.notes))
        self.assertEqual(len(data.open_report(folders[:1]).notes), 0)

    def test_steps_of_a_run_without_max_steps(self):
        # 0 is no number of steps; the 40 that were taken are, and tell it from others only where those took more or less.
        report = data.open_report([self.usual("a", **{"run.max_steps": 0, "optimizer.kind": "adamw"}),
                                   self.usual("b", **{"run.max_steps": 41, "optimizer.kind": "muon"})])
        self.assertEqual(report.keys, ["run.max_steps", "optimizer.kind"])
        self.assertEqual([run.values["run.max_steps"] for run in report.runs], ["40", "41"])
        report = data.open_report([self.path("a"), self.usual("c", **{"optimizer.kind": "muon"})])
        self.assertEqual(report.keys, ["optimizer.kind"])

    def test_names_of_keys_that_two_sections_have(self):
        every = {"validation.every": 10, "checkpoint.every": 10}
        report = data.open_report([self.usual("a", **every), self.usual("b", **{**every, "validation.every": 20})])
        self.assertEqual([report.short(key) for key in report.keys], ["validation.every"])

    def kinds(self, ttt_steps):
        """A DFlash run of blocks of 4 beside an EAGLE-3 run."""
        slots = [0.5] * ttt_steps
        dflash = [step_line(1, acc=[None, 0.5, 0.5, 0.5]), val_line(1, 1.5, val_acc=[None, 0.75, 0.5, 0.25])]
        eagle3 = [step_line(1, acc=slots), val_line(1, 1.4, val_acc=slots)]
        return data.open_report([self.run_folder(f"d{ttt_steps}", dflash, **{"drafter.kind": "dflash"}),
                                 self.run_folder(f"e{ttt_steps}", eagle3, **{"drafter.kind": "eagle3"})])

    def test_kinds_have_drafts_in_common_and_no_rows(self):
        self.assertEqual([run.most_drafts() for run in self.kinds(3).runs], [3, 3])
        self.assertEqual([run.most_drafts() for run in self.kinds(4).runs], [3, 4])
        self.assertFalse(data.open_report([self.path("d3"), self.path("e3")]).one_kind())
        self.assertTrue(data.open_report([self.path("d3"), self.path("d4")]).one_kind())

    def test_pareto_front(self):
        points = {"a": (1.0, {"seconds": 1.0}), "b": (2.0, {"seconds": 2.0}), "c": (1.5, {"seconds": 3.0}),
                  "d": (2.0, {"seconds": 2.0}), "e": (None, {"seconds": 0.1}), "f": (1.0, {"seconds": 1.5})}
        self.assertEqual(data.on_front(points, "seconds"), ["a", "b", "d"])

    def test_memory_within_one_percent_is_equal(self):
        # What dtrain sweep marks, too: tests/test_sweep_table.c.
        def front(points):
            return data.on_front({str(i): (score, {"memory_bytes": bytes}) for i, (score, bytes) in enumerate(points, 1)},
                                 "memory_bytes")

        self.assertEqual(front([(1.0, 206.4), (1.1, 207.5), (1.2, 206.0), (1.3, 207.0)]), ["4"])
        self.assertEqual(front([(1.0, 100.0), (1.1, 100.6), (1.2, 101.2), (1.3, 101.8), (1.4, 102.4), (1.5, 103.0)]),
                         ["2", "4", "6"])
        self.assertEqual(front([(1.0, 100.0), (2.0, 200.0), (1.5, 150.0), (2.0, 200.0), (1.0, 100.5), (1.9, 199.0)]),
                         ["1", "2", "3", "4"])

    def test_colours_of_what_is_nearly_equal(self):
        self.assertEqual(data.colour_range([1.0, 3.0]), (1.0, 3.0))
        low, high = data.colour_range([199.0, 200.0])
        self.assertAlmostEqual(low, 194.5)
        self.assertAlmostEqual(high, 204.5)
        self.assertEqual(data.colour_range([0.0]), (0.0, 0.0))

    def test_without_validation_the_loss_decides(self):
        folders = [self.run_folder(name, [step_line(1), step_line(2, loss=loss)]) for name, loss in
                   (("worse", 3.0), ("better", 2.0))]
        report = data.open_report(folders)
        self.assertEqual((report.best, report.score_name), ("better", "loss"))

    def test_a_sweep_that_goes_on(self):
        self.usual("sweep/size=4")
        self.usual("sweep/size=8", gain=1.0)
        points = [{"name": "size=4", "state": "done"}, {"name": "size=8", "state": "running"},
                  {"name": "size=16", "state": "does_not_fit", "reason": "needs 9 GiB"}]
        with open(self.path("sweep", "sweep.json"), "w", encoding="utf-8") as file:
            json.dump({"grid": [{"key": "a.size", "values": ["4", "8", "16"]}], "points": points}, file)
        report = data.open_report([self.path("sweep")])
        self.assertEqual([run.label for run in report.runs], ["size=4", "size=8"])
        self.assertEqual(report.best, "size=4")  # what has not ended is not compared
        self.assertEqual(report.fronts["seconds"], ["size=4"])
        self.assertEqual(report.missing, {"size=16": ({"a.size": "16"}, "does_not_fit", "needs 9 GiB")})
        self.assertEqual(report.axis("a.size"), ["4", "8", "16"])
        self.assertIn("size=8: running", report.notes[0])

    def test_a_damaged_sweep(self):
        os.makedirs(self.path("sweep"))
        for text in ("[]", '{"grid": 5}', '{"grid": [{"key": "a.b", "values": ["1"]}], "points": [{}]}'):
            with open(self.path("sweep", "sweep.json"), "w", encoding="utf-8") as file:
                file.write(text)
            self.fails("not what dtrain sweep writes", self.path("sweep"))

    def test_values_of_points(self):
        # Names are cut where they are long, and lists are not spelled out; two keys may end alike.
        grid = [{"key": "validation.every", "values": ["4", "8"]},
                {"key": "checkpoint.every", "values": ["16"]}, {"key": "optimizer.betas", "values": ["[0.9,0.95]", "[0.9,0.98]"]}]
        points = [{"name": f"cut~{at}", "state": "done"} for at in range(4)]
        keys, found = data.points_of({"grid": grid, "points": points})
        self.assertEqual(keys, ["validation.every", "checkpoint.every", "optimizer.betas"])
        self.assertEqual([(point["name"], *values.values()) for point, values in found],
                         [("cut~0", "4", "16", "[0.9,0.95]"), ("cut~1", "4", "16", "[0.9,0.98]"),
                          ("cut~2", "8", "16", "[0.9,0.95]"), ("cut~3", "8", "16", "[0.9,0.98]")])


@needs_matplotlib
class Drawing(Comparing):
    """Runs the comparisons, too: they are what is drawn."""

    def drawn(self, report):
        found = {figure.name: plot for figure, plot in figures.draw(report)}
        self.addCleanup(lambda: [figures.close(plot) for plot in found.values()])
        return found

    def page(self, report):
        drawn = figures.draw(report)
        self.addCleanup(lambda: [figures.close(plot) for _, plot in drawn])
        return report_page.page(report, drawn)

    def numbers(self, page):
        return json.loads(re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.S).group(1))

    def test_curves_of_one_run(self):
        found = self.drawn(data.open_report([self.usual()]))
        lines = {line.get_label(): line for line in found["loss"].axes[0].get_lines()}
        self.assertEqual(list(lines["training"].get_ydata()), [10.0 / step for step in range(1, 41)])
        self.assertEqual(list(lines["validation"].get_ydata()), [5.0, 4.0, 3.0, 2.0, 1.0])
        walk = {line.get_label(): line for line in found["acceptance"].axes[0].get_lines()}["validation, as decoding would"]
        self.assertEqual((list(walk.get_xdata()), list(walk.get_ydata())), ([0, 10, 20, 30, 40], [1.0, 1.3, 1.3, 1.5, 1.3]))
        slots = [list(line.get_ydata()) for line in found["slots"].axes[0].get_lines()]
        self.assertEqual(slots, [[0.75, step / 100] for step in (0, 10, 20, 30, 40)])

    def test_heat_maps(self):
        drawn = self.drawn(self.grid())
        texts = [text.get_text() for text in drawn["compare-best_walk"].axes[0].texts]
        self.assertEqual(texts, ["1.600", "1.650", "1.500", "1.550"])  # 128 above 32
        cells = drawn["compare-memory_bytes"].axes[0].patches  # all take the same
        self.assertEqual([cell.get_facecolor() for cell in cells if cell.get_fill()], [figures.COST(0.5)] * 4)

    def framed(self, plot):
        """(column, row) of the framed cell."""
        frames = [cell for cell in plot.axes[0].patches if not cell.get_fill()]
        self.assertEqual(len(frames), 1)
        return int(frames[0].get_x()), int(frames[0].get_y())

    def test_the_framed_cell_is_the_best_point(self):
        # Points of equal score: the one that took less time, wherever it stands, and the table has it first.
        for quick in ("32-4", "32-16", "128-4", "128-16"):
            for size in (4, 16):
                for anchors in (32, 128):
                    name = f"{anchors}-{size}"
                    lines = [step_line(step, seconds=0.1 if name == quick else 0.2) for step in (1, 2)]
                    self.run_folder(f"{quick}/{name}", lines + [val_line(2, 1.5)],
                                    **{"anchors.max_anchors": anchors, "drafter.block_size": size})
            report = data.open_report([self.path(quick, name) for name in sorted(os.listdir(self.path(quick)))])
            self.assertEqual(report.best, quick)
            anchors, size = quick.split("-")
            place = (["4", "16"].index(size), ["128", "32"].index(anchors))
            drawn = figures.draw(report)
            page = report_page.page(report, drawn)
            frames = {figure.name: self.framed(plot) for figure, plot in drawn if figure.name.startswith("compare-")}
            for _, plot in drawn:
                figures.close(plot)
            self.assertEqual(frames, {"compare-" + name: place for name in ("best_walk", "seconds", "memory_bytes")})
            self.assertIn('<span class="mark">best</span>', re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.S)[1])

    def test_what_has_not_ended_is_not_framed(self):
        report = self.grid()
        report.runs[3].state = "running"
        report = data.Report("title", report.runs, report.keys)
        self.assertEqual(report.best, "a128-b4")
        self.assertEqual(self.framed(self.drawn(report)["compare-best_walk"]), (0, 0))
        self.assertIn("1.600", report_page.lead_of_several(report))

    def test_bytes_are_as_in_plans(self):
        self.assertEqual([figures.format_bytes(value) for value in (0, 1536, 57.25 * 2 ** 20, 1000 * 2 ** 20, 2 ** 40)],
                         ["0 B", "1.5 KiB", "57.2 MiB", "1000 MiB", "1 TiB"])
        ticks = figures.ByteLocator(4, steps=[1, 2, 5, 10]).tick_values(0, 70 * 2 ** 20)
        self.assertEqual([tick / 2 ** 20 for tick in ticks], [0.0, 20.0, 40.0, 60.0, 80.0])

    def test_texts_of_cells_are_read(self):
        for colours in (figures.HEAT, figures.COST):
            for level in range(11):
                colour = colours(level / 10)
                channels = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
                luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
                contrast = 1.05 / (luminance + 0.05) if figures.is_dark(colour) else (luminance + 0.05) / 0.06
                self.assertGreater(contrast, 4.0, (level, colour))

    def test_bars(self):
        report = self.grid()
        found = self.drawn(report)
        self.assertEqual([bar.get_width() for bar in found["throughput"].axes[0].patches], [15.0] * 4)
        widths = sum(bar.get_width() for bar in found["time"].axes[0].patches)
        self.assertAlmostEqual(widths, 4 * 2.0)

    def test_page_of_one_run(self):
        report = data.open_report([self.usual()])
        page = self.page(report)
        numbers = self.numbers(page)
        self.assertEqual(numbers["runs"][0]["curves"]["loss"]["value"], [10.0 / step for step in range(1, 41)])
        self.assertEqual(numbers["runs"][0]["validations"]["accept_len_walk"]["value"], [1.0, 1.3, 1.3, 1.5, 1.3])
        self.assertEqual(numbers["runs"][0]["summary"]["best_walk"], 1.5)
        self.assertIn("1.500 tokens at best (step 30), from 1.000 at the start", page)
        self.assertIn('<b class="alarm">25 %</b>', page)

    def test_page_stands_alone(self):
        page = self.page(self.grid())
        self.assertNotRegex(page, r'(src|href)="(?!#)|url\((?!#)|@import')
        ids = re.findall(r'\bid="([^"]+)"', page)
        self.assertEqual(len(ids), len(set(ids)))
        for used in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
            self.assertIn(used, ids)
        for colour in figures.SERIES + (figures.INK, figures.PAPER):
            self.assertNotIn(colour, re.sub(r":root \{[^}]*\}", "", page))  # all by name

    def test_table_marks_the_best_and_the_front(self):
        page = self.page(self.grid())
        rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.S)[1:]
        self.assertEqual(len(rows), 4)
        self.assertIn(">128<", rows[0])
        self.assertIn('<span class="mark">best</span>', rows[0])
        self.assertIn("front: time, memory", rows[0])
        self.assertFalse(any('class="mark' in row for row in rows[1:]))

    def test_table_of_two_kinds(self):
        alike, longer = self.page(self.kinds(3)), self.page(self.kinds(4))
        self.assertNotIn("different numbers of drafts", alike)
        self.assertIn("different numbers of drafts", longer)
        self.assertNotIn("block rows/s", alike)
        self.assertIn("block rows/s", self.page(data.open_report([self.path("d3"), self.path("d4")])))

    def test_table_of_one_point_and_those_that_do_not_fit(self):
        self.usual("sweep/size=4")
        points = [{"name": "size=4", "state": "done"}, {"name": "size=8", "state": "does not fit", "reason": "needs 9 GiB"}]
        with open(self.path("sweep", "sweep.json"), "w", encoding="utf-8") as file:
            json.dump({"grid": [{"key": "a.size", "values": ["4", "8"]}], "points": points}, file)
        self.assertIn("does not fit: needs 9 GiB</td>", self.page(data.open_report([self.path("sweep")])))

    def test_names_are_text(self):
        folder = self.usual("<script>alert(1)<&script>")
        page = self.page(data.open_report([folder]))
        self.assertFalse("<script>alert" in page)

    def test_steps_of_no_time(self):
        lines = [{name: value for name, value in step_line(step, seconds=0.0).items() if "_seconds" not in name}
                 for step in (1, 2)]
        self.drawn(data.open_report([self.run_folder("timeless", lines)]))

    def test_a_run_of_one_step(self):
        self.page(data.open_report([self.run_folder("r", [step_line(1)])]))

    def test_runs_that_differ_in_nothing_and_lack_members(self):
        bare = [{"step": step, "loss": 1.0 / step, "seconds": 1.0} for step in range(1, 5)]
        folders = [self.run_folder(f"r{i}", bare) for i in range(10)]
        page = self.page(data.open_report(folders))
        self.assertIn("r0", page)

    def test_command(self):
        folder, out = self.usual(), io.StringIO()
        with mock.patch.object(sys, "argv", ["report.py", folder, "--png", self.path("png"), "--svg", self.path("svg")]):
            with contextlib.redirect_stdout(out):
                tool.main()
        self.assertIn("report.html: Step 40 of 40.", out.getvalue())
        self.assertTrue(os.path.getsize(self.path("run", "report.html")) > 10000)
        self.assertIn("loss.png", os.listdir(self.path("png")))
        self.assertEqual(len(os.listdir(self.path("png"))), len(os.listdir(self.path("svg"))))

    def test_command_refuses_in_words(self):
        said = io.StringIO()
        with mock.patch.object(sys, "argv", ["report.py", self.path("none")]), contextlib.redirect_stderr(said):
            with self.assertRaises(SystemExit) as ended:
                tool.main()
        self.assertEqual(ended.exception.code, 2)
        self.assertEqual(said.getvalue(), f"error: {self.path('none')}: there is no such folder\n")


class Places(Folders):
    """Where the page goes is looked at before the work, so before the folders."""

    def refusal(self, out):
        said = io.StringIO()
        with mock.patch.object(sys, "argv", ["report.py", self.path("none"), "--out", out]), contextlib.redirect_stderr(said):
            with self.assertRaises(SystemExit) as ended:
                tool.main()
        self.assertEqual(ended.exception.code, 2)
        return said.getvalue()

    def test_bad_places_are_refused_first(self):
        os.makedirs(self.path("folder"))
        self.assertIn("folder: is a folder; name a file", self.refusal(self.path("folder")))
        self.assertIn("missing; make it first", self.refusal(self.path("missing", "page.html")))
        self.assertIn("none: there is no such folder", self.refusal(self.path("page.html")))
        self.assertFalse(os.path.exists(self.path("page.html")))


class WithoutMatplotlib(Folders):
    def test_it_says_what_is_needed(self):
        hide = "import sys; sys.modules['matplotlib'] = None; sys.argv[0] = 'report.py'; import report; report.main()"
        found = subprocess.run([sys.executable, "-c", hide, self.usual()], cwd=TOOLS, capture_output=True, text=True)
        self.assertEqual(found.returncode, 2)
        self.assertIn("the report needs matplotlib: pip install matplotlib", found.stderr)

    @needs_matplotlib
    def test_it_says_what_is_too_old(self):
        age = "import sys, matplotlib; matplotlib.__version__, matplotlib.__version_info__ = '3.6.3', (3, 6, 3, 'final', 0); " \
              "sys.argv[0] = 'report.py'; import report; report.main()"
        found = subprocess.run([sys.executable, "-c", age, self.usual()], cwd=TOOLS, capture_output=True, text=True)
        self.assertEqual(found.returncode, 2)
        self.assertIn("matplotlib 3.6.3 is too old", found.stderr)


@unittest.skipIf(not DTRAIN, "needs DTRAIN")
class RealSweep(Folders):
    def test_numbers_are_those_of_the_table(self):
        import tiny_run
        os.makedirs(self.path("data"))
        runs = tiny_run.Runs(self.path("data"), DTRAIN)
        with open(self.path("sweep.out"), "w", encoding="utf-8") as out:
            status = subprocess.call(
                [DTRAIN, "sweep", "--config", runs.path("run.yaml"), "--set", f"run.dir={runs.path('sweep')}", "--set",
                 "run.max_steps=24", "--set", "validation.every=6", "--grid",
                 "max_anchors=8,16", "--grid", "block_size=4,6"], stdout=out, stderr=subprocess.STDOUT)
        with open(self.path("sweep.out"), encoding="utf-8") as file:
            self.assertEqual(status, 0, file.read())
        report = data.open_report([runs.path("sweep")])
        with open(runs.path("sweep", "table.json"), encoding="utf-8") as file:
            table = json.load(file)
        self.assertEqual(len(table["points"]), 4)
        self.assertEqual(report.plane(), ["anchors.max_anchors", "drafter.block_size"])
        names = {"best_accept_len_walk": "best_walk", "best_step": "best_step", "accept_len_walk": "walk", "loss": "loss",
                 "overlap": "overlap", "val_loss": "val_loss", "accept_len_walk_1": "walk_1", "seconds": "seconds",
                 "block_rows_per_second": "block_rows_per_second", "tokens_per_second": "tokens_per_second",
                 "memory_bytes": "memory_bytes", "step_seconds": "step_seconds", "val_seconds": "val_seconds"}
        for point in table["points"]:
            found = report.summaries[point["point"]]
            there = {**point["result"], **point["measured"]}
            for name, own in names.items():
                self.assertAlmostEqual(found[own], there[name], places=9, msg=f"{point['point']}: {name}")
            for name, cost in (("front_time", "seconds"), ("front_memory", "memory_bytes")):
                self.assertEqual(point["point"] in report.fronts[cost], point[name])
        self.assertEqual(report.best, table["best"])
        if figures is not None:
            drawn = figures.draw(report)
            page = report_page.page(report, drawn)
            for _, plot in drawn:
                figures.close(plot)
            self.assertIn(f"{report.summaries[report.best]['best_walk']:.3f}", page)


if __name__ == "__main__":
    unittest.main()
