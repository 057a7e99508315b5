"""Where frames begin and end in what a worker and its server send, as `rust/core/src/wire/header.rs` says."""

import struct
from dataclasses import dataclass

MAGIC = b"OFBT"
HEADER_BYTES = 64
KINDS = {
    1: "Hello",
    2: "Challenge",
    3: "Authenticate",
    4: "Welcome",
    5: "Join",
    6: "Joined",
    7: "Attach",
    8: "Attached",
    16: "Call",
    17: "Reply",
    32: "Push",
    33: "Fragment",
    34: "Grant",
    35: "Pull",
    36: "Root",
    37: "Receipt",
    38: "PullEnd",
    39: "Value",
    48: "Heartbeat",
    49: "Event",
    63: "Refused",
}


@dataclass(frozen=True)
class Frame:
    """What a frame's header says of it."""

    kind: str
    request: int
    """Chosen by the worker, echoed by the server."""
    sequence: int
    """Of the push that it belongs to."""
    num_bytes: int
    """With the header."""


class Frames:
    """One way of a connection, cut into pieces of frames as its bytes come."""

    def __init__(self):
        self._head, self._frame, self._place = b"", None, 0
        self._is_foreign = False

    def pieces(self, chunk):
        """Give what is known now: of which frame, from which byte of it on, and the bytes.

        A header's bytes wait for its last one. Of what is no Offbeat frame, and of all after it, the frame is
        None.
        """
        while chunk:
            if self._is_foreign:
                yield None, 0, chunk
                return
            if self._frame is None:
                wanted = HEADER_BYTES - len(self._head)
                self._head, chunk = self._head + chunk[:wanted], chunk[wanted:]
                if not MAGIC.startswith(self._head[:4]):
                    self._is_foreign = True
                    yield None, 0, self.rest()
                elif len(self._head) == HEADER_BYTES:
                    self._frame, self._place = read(self._head), 0
                    yield from self._piece(self.rest())
            else:
                wanted = self._frame.num_bytes - self._place
                yield from self._piece(chunk[:wanted])
                chunk = chunk[wanted:]

    def rest(self):
        """Give up waiting for a header's other bytes, as at the end of the connection."""
        head, self._head = self._head, b""
        return head

    def _piece(self, piece):
        frame, place = self._frame, self._place
        self._place += len(piece)
        if self._place == frame.num_bytes:
            self._frame = None
        yield frame, place, piece


def read(header):
    """Read a header's 64 bytes."""
    kind, request, payload_bytes, sequence = struct.unpack_from("<6xBxII8xQ", header)
    return Frame(KINDS.get(kind, f"kind {kind}"), request, sequence, HEADER_BYTES + payload_bytes)
