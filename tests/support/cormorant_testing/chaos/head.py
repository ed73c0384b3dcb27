"""`python -m cormorant_testing.chaos.head ...`: `cormorant_api` whose fleet has short limits."""

import faulthandler
import signal
import sys

from cormorant_api import __main__ as head
from cormorant_testing.chaos.world import CONTROL_S, HANG_S, STARTUP_S
from cormorant_worker.fleet.options import FleetOptions

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    engine = "ray" if "ray" in sys.argv else "local"
    limits = {"control_timeout_s": CONTROL_S, "hang_timeout_s": HANG_S, "startup_timeout_s": STARTUP_S[engine]}
    FleetOptions.__init__.__kwdefaults__.update(limits)  # the head imports it late
    sys.exit(head.main())
