#!/usr/bin/env python3
"""One run, several, or a sweep, as one page: is it learning, what does it take, which is best.

    report.py RUN                       # RUN/report.html
    report.py SWEEP                     # a folder of `dtrain sweep`: tables, fronts and heat maps
    report.py RUN RUN ... --out FILE    # a comparison of runs

Needs matplotlib 3.7 or newer. The page is one file that needs nothing else; it holds its numbers as JSON, too (id "numbers").
A run that goes on may be looked at; start the tool again for newer numbers.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dtrain_tools.report_data import ReportError, open_report  # noqa: E402

REFUSED = 2
OLDEST = (3, 7)  # matplotlib that can place legends outside


def parse(arguments):
    parser = argparse.ArgumentParser(description="a page about one run, several, or a sweep",
                                     epilog="Numbers are explained in docs/watching.md and docs/file-formats.md.")
    parser.add_argument("folders", nargs="+", metavar="DIR", help="run folders, or one folder of dtrain sweep")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the only folder, else here)")
    parser.add_argument("--png", metavar="DIR", help="every figure as a PNG, too")
    parser.add_argument("--svg", metavar="DIR", help="every figure as an SVG, too")
    return parser.parse_args(arguments)


def save_figures(figures, drawn, folder, kind):
    os.makedirs(folder, exist_ok=True)
    for figure, plot in drawn:
        figures.save(plot, os.path.join(folder, f"{figure.name}.{kind}"), kind)


def check_out(out):
    """Before the work: drawing takes long."""
    if os.path.isdir(out):
        raise ReportError(f"--out: {out}: is a folder; name a file")
    folder = os.path.dirname(out) or "."
    if not os.path.isdir(folder):
        raise ReportError(f"--out: {out}: there is no folder {folder}; make it first")
    if not os.access(out if os.path.exists(out) else folder, os.W_OK):
        raise ReportError(f"--out: {out}: can not be written")


def run(arguments):
    out = arguments.out or os.path.join(arguments.folders[0] if len(arguments.folders) == 1 else ".", "report.html")
    if arguments.out:
        check_out(out)
    report = open_report(arguments.folders)
    try:
        import matplotlib
        if matplotlib.__version_info__[:2] < OLDEST:
            raise ImportError(f"matplotlib {matplotlib.__version__} is too old, 3.7 or newer can be used")
        from dtrain_tools import report_figures as figures
        from dtrain_tools import report_page
    except ImportError as error:
        raise ReportError(f"{error}: the report needs matplotlib: pip install matplotlib") from error
    drawn = figures.draw(report)
    text = report_page.page(report, drawn)
    with open(out, "w", encoding="utf-8") as file:
        file.write(text)
    for folder, kind in ((arguments.png, "png"), (arguments.svg, "svg")):
        if folder:
            save_figures(figures, drawn, folder, kind)
    for _, plot in drawn:
        figures.close(plot)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{out}: {report_page.lead(report)}")


def main():
    try:
        run(parse(sys.argv[1:]))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
