"""How a head behaves beside what the manifest says: where it listens, what it keeps, time limits."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cormorant_api.errors import HeadError

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """Every wait of a head has its limit here."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 = any that is free."""
    data_port: int = 0
    """For bulk bytes; 0 = the one after `port`, or any that is free where `port` is 0."""
    directory: Path | None = None
    """What outlives the process: weights, the count of frames, tokens. None keeps all that in memory."""
    token_file: Path | None = None
    has_tokens: bool = True
    """False: everybody who reaches the port is the operator; on loopback only."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    epoch: int = 0
    """Which head of the job this is, from 1, for whoever counts them elsewhere; 0: `directory` does."""
    floor_frames: int = 0
    """Frames that earlier heads are known to have settled, whatever `directory` says."""
    last_words: Path | None = None
    """File for the count of settled frames as JSON, right at any moment, for whoever starts the next head."""
    keep_versions: int = 5
    """Versions of each model that are retained."""
    max_body_bytes: int = 16 << 30
    """Longest body of weights or state, whatever the policy."""
    ack_within_s: float = 60.0
    """After which a batch that was not acknowledged goes to the next consumer."""
    apply_within_s: float = 120.0
    """After which a worker that has not acknowledged weights is late."""
    stall_timeout_s: float = 60.0
    """For one chunk of a body, either way."""
    drain_s: float = 30.0
    """At SIGTERM: for batches under way to land and to be acknowledged."""
    grace_s: float = 5.0
    """At the end: for requests under way; then they are cut off."""
    linger_s: float = 3.0
    """After the end of the job: for consumers to hear of it."""

    @property
    def second_port(self) -> int:
        """Where bulk bytes are served."""
        return self.data_port or (self.port + 1 if self.port else 0)

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            HeadError: with the two values that do not go together.
        """
        if not self.has_tokens and not _is_loopback(self.host):
            raise HeadError(f"--no-tokens on {self.host}: without tokens a head listens on loopback only; leave it out")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise HeadError("--tls-cert and --tls-key belong together; give both or none")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
