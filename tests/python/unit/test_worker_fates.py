"""What a log line tells of the pushes since the last one."""

from offbeat import Receipt
from offbeat.worker.fates import Fates


def test_the_staleness_of_a_line_is_that_of_the_applied_pushes():
    fates = Fates()
    for staleness, applied in ((1, True), (3, True), (50, False)):
        verdict, reason = ("admit", None) if applied else ("reject", "stale")
        fates.add(Receipt(1, 9, staleness, 1.0, verdict, applied, duplicate=False, reason=reason))
    assert fates.read() == "2 pushes applied (mean staleness 2.0), 1 rejected: 1x stale"
    assert fates.read() == "", "it has begun anew"
