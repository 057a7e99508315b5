"""From `ParameterServer`'s keywords to what the Rust server reads; every bad one is named at once."""

import os
from dataclasses import dataclass
from typing import Any

from offbeat import checkpoints, schedule, staleness
from offbeat.address import LARGEST_PORT, THIS_MACHINE
from offbeat.checks import Faults, is_count, refuse, seconds, strings
from offbeat.extras import lacks
from offbeat.naming import unknown
from offbeat.optim import as_spec

__all__ = ["Settings"]

UPDATE_RULES = ("async_sgd",)
TRANSACTIONS = ("fragment", "model")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keywords of `ParameterServer`, as given."""

    port: int
    host: str | None
    optimizer: object
    update_rule: str
    staleness_policy: staleness.Policy
    staleness_lr_factor: float
    max_staleness: int | None
    momentum_correction: bool | None
    transaction: str
    lr_schedule: schedule.Schedule | str | None
    max_samples: int | None
    token: str | None
    run_id: str | None
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_frequency: int | str | None
    resume: str
    insecure: bool
    linger_s: float
    rejoin_grace_s: float
    metrics_port: int | None
    metrics_host: str

    def resolve(self) -> dict[str, Any]:
        """Check everything and write the Rust server's configuration, as JSON carries it.

        Raises:
            ConfigError: Naming every setting that cannot be used.
        """
        faults = Faults()
        faults += self._plain_faults()
        late, correction = faults.catch(self._staleness) or ({}, self.momentum_correction)
        rate = faults.catch(lambda: schedule.resolve(self.lr_schedule, max_samples=self.max_samples).spec())
        optimizer = None
        if self.optimizer is not None:
            optimizer = faults.catch(lambda: as_spec(self.optimizer).spec(momentum_correction=correction))
        kept = faults.catch(
            lambda: checkpoints.resolve(self.checkpoint_dir, self.checkpoint_frequency, self.resume)
        )
        token = self.token or os.environ.get("OFFBEAT_TOKEN") or None
        host = self.host or os.environ.get("OFFBEAT_HOST") or None
        if isinstance(host, str) and host not in THIS_MACHINE and not token and not self.insecure:
            faults.append(
                f"host is {host!r} but there is no token, so anyone who reaches the port could train the "
                "model: give token= (or set OFFBEAT_TOKEN, here and on the workers), or say insecure=True"
            )
        refuse(faults)
        return {
            "host": host,
            "port": self.port,
            "token": token,
            "insecure": self.insecure,
            "run_id": self.run_id,
            "transaction": self.transaction,
            "staleness": late,
            "schedule": rate,
            "max_samples": self.max_samples,
            "optimizer": optimizer,
            "momentum_correction": correction,
            "linger_s": float(self.linger_s),
            "rejoin_grace_s": float(self.rejoin_grace_s),
            "checkpoints": kept,
        }

    def _staleness(self) -> tuple[dict[str, Any], bool | None]:
        return staleness.resolve(
            self.staleness_policy,
            lr_factor=self.staleness_lr_factor,
            max_staleness=self.max_staleness,
            momentum_correction=self.momentum_correction,
        )

    def _plain_faults(self) -> list[str]:
        faults = strings(host=self.host, token=self.token, run_id=self.run_id)
        if not is_count(self.port) or self.port > LARGEST_PORT:
            faults.append(f"port is {self.port!r}: it is 0 (a free one) to {LARGEST_PORT}")
        if self.update_rule not in UPDATE_RULES:
            faults.append(unknown("update_rule", self.update_rule, UPDATE_RULES))
        if self.transaction not in TRANSACTIONS:
            faults.append(unknown("transaction", self.transaction, TRANSACTIONS))
        if not isinstance(self.insecure, bool):
            faults.append(f"insecure is {self.insecure!r}: it is True or False")
        if not isinstance(self.momentum_correction, bool | None):
            faults.append(f"momentum_correction is {self.momentum_correction!r}: it is True, False or None")
        if self.max_samples is not None and not is_count(self.max_samples, least=1):
            faults.append(f"max_samples is {self.max_samples!r}: it is 1 or more, or None for no end")
        faults += self._metrics_faults()
        faults += seconds(finite=True, linger_s=self.linger_s, rejoin_grace_s=self.rejoin_grace_s)
        return faults

    def _metrics_faults(self) -> list[str]:
        port, host = self.metrics_port, self.metrics_host
        if not host or strings(metrics_host=host):
            return [f"metrics_host is {host!r}: give an address to listen on"]
        if port is None:
            is_default = host == THIS_MACHINE[0]
            return (
                []
                if is_default
                else [f"metrics_host is {host!r}, and there is no metrics_port: give one, too"]
            )
        faults = []
        if not is_count(port) or port > LARGEST_PORT:
            faults.append(
                f"metrics_port is {port!r}: it is 0 (a free one) to {LARGEST_PORT}, or None for none"
            )
        if host not in THIS_MACHINE and not self.insecure:
            faults.append(
                f"metrics_host is {host!r}, where anyone who reaches the port can read how the run goes: say "
                "insecure=True, or leave it out and let this machine's own collector ask"
            )
        if fault := lacks("prometheus_client", "metrics_port"):
            faults.append(fault)
        return faults
