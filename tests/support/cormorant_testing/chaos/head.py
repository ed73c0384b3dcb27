"""`python -m cormorant_testing.chaos.head ...`: `cormorant_api` whose fleet has short limits."""

import faulthandler
import signal
import sys
from functools import partial

from cormorant_api import __main__ as head
from cormorant_testing.chaos.world import CONTROL_S, HANG_S, STARTUP_S
from cormorant_worker.fleet.options import FleetOptions

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    engine = "ray" if "ray" in sys.argv else "local"
    limits = {"control_timeout_s": CONTROL_S, "hang_timeout_s": HANG_S, "startup_timeout_s": STARTUP_S[engine]}
    head.FleetOptions = partial(FleetOptions, **limits)
    sys.exit(head.main())
