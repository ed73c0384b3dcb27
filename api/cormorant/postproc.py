"""Post-processing of batches: functions of TensorDicts, on the CPU and on the GPU."""

from cormorant_contract.errors import needs

with needs("worker"):
    from cormorant_postproc import *  # noqa: F403
    from cormorant_postproc import __all__ as __all__
