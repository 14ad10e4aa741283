"""What the command line tools share: messages, lists of layers, and which failures end with which status."""
import sys
import time

from dtrain_tools.documents import InputError
from dtrain_tools.shards import DiskFull
from dtrain_tools.spool import Stalled

RUN_FAILED, REFUSED = 1, 2


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def layer_list(text):
    return [int(part) for part in text.split(",")]


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
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return RUN_FAILED
    return 0
