"""What a process of a test does; in a module of its own, so that a spawned process can import it."""

import offbeat

kept = None


def push_once(address, worker_id):
    """Join, push and return, without closing: the end of the process does."""
    global kept  # noqa: PLW0603  or it would be closed here
    kept = offbeat.Client(address, worker_id=worker_id)
    assert kept.push(kept.pull()).applied
