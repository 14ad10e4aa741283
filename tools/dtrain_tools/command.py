"""What the command line tools share: messages, lists of layers, and which failures end with which status."""
import argparse
import sys
import time

from dtrain_tools.documents import InputError
from dtrain_tools.shards import DiskFull
from dtrain_tools.spool import Stalled

RUN_FAILED, REFUSED = 1, 2


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """States defaults, but for those that are none or that the text names itself."""

    def _get_help_string(self, action):
        nothing = action.default is None or action.default is False or action.default == []
        if nothing or "default" in action.help:
            return action.help
        return super()._get_help_string(action)


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def layer_list(text):
    return [int(part) for part in text.split(",")]


def check_cutting(parser, args):
    """--split-val and --shard-bytes."""
    if not (0 <= args.split_val < 1 or (args.split_val >= 1 and float(args.split_val).is_integer())):
        parser.error("--split-val is a share below 1 or a whole number")
    if args.shard_bytes <= 0:
        parser.error("--shard-bytes must be above 0")


def exit_status(action, arguments):
    """Runs a tool that can be started again to go on: 0, or the status that belongs to what ended it."""
    try:
        action(arguments)
    except InputError as error:
        say(f"error: {error}")
        return REFUSED
    except (DiskFull, MemoryError, Stalled) as error:
        say(f"error: {error}")
        return RUN_FAILED
    except OSError as error:
        if error.filename is None:  # not of a file that was asked for
            raise
        say(f"error: {error.filename}: {error.strerror}")
        return RUN_FAILED
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return RUN_FAILED
    return 0
