"""A tracker as a user would write one: it keeps what it is told."""


class Told:
    """Keeps what it is told in `calls`, each (values, step); raises `error` instead where it has one."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def log(self, values, step):
        if self.error is not None:
            raise self.error
        self.calls.append((dict(values), step))

    def finish(self):
        pass

    @property
    def by_step(self):
        told = {}
        for values, step in self.calls:
            told.setdefault(step, {}).update(values)
        return told
