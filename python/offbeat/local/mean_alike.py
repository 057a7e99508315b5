"""The mean of what differs in members, by the samples of each; what is not finite has no part in it."""

import hashlib
import io
from collections.abc import Mapping, Sequence

import torch
from torch import distributed

from offbeat.local.buffers import write
from offbeat.local.flat import wide
from offbeat.local.group import is_alike, is_plain, take_first

__all__ = ["left_out", "make_alike", "shares"]

ROUNDING = 1000
"""Epsilons by which the sums of numbers that are one in each member may part."""


def make_alike(
    group: distributed.ProcessGroup,
    tensors: Mapping[str, torch.Tensor],
    samples: Mapping[str, float],
    device: torch.device,
) -> dict[str, list[int]]:
    """Give tensors that differ their mean over members, by samples; or else the first one's.

    Those that have no mean are of whole numbers or truth values, sparse, quantized or nested.

    Args:
        group: Of the members, all of which call this.
        tensors: By name, the same in all members.
        samples: That each of this member has seen, by name.
        device: Of the tensors that the group carries.

    Returns:
        By the names of tensors: the members whose part was not finite, and was left out; in all members.
    """
    out: dict[str, list[int]] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if is_alike(group, _bits(tensor), device):
                continue  # as a mask or a table is: a mean would round it
            if not (is_plain(tensor) and (tensor.is_floating_point() or tensor.is_complex())):
                take_first(group, tensor)
                continue
            value = tensor.to(wide(tensor.dtype)).resolve_conj().resolve_neg().contiguous()
            everybody = _told(group, device, samples=samples[name], is_finite=bool(value.isfinite().all()))
            if ranks := left_out(*everybody):
                out[name] = ranks
            share = shares(*everybody)[distributed.get_rank(group)]
            # What counts for nothing may be infinite.
            value = value * share if share else torch.zeros_like(value)
            # Backends do not add up complex numbers, all of them.
            distributed.all_reduce(torch.view_as_real(value) if value.is_complex() else value, group=group)
            write(value, tensor, num_eps=ROUNDING)
    return out


def shares(samples: Sequence[float], are_finite: Sequence[bool]) -> list[float]:
    """Give each member's share in a tensor's mean, of what each has seen, and whether its part is finite.

    Those that are not have none, unless nobody's is. Where nobody else has seen anything, the first one's
    counts that is left.
    """
    is_any = any(are_finite)
    sound = [rank for rank, is_finite in enumerate(are_finite) if is_finite or not is_any]
    total = sum(samples[rank] for rank in sound)
    if not total:
        return [float(rank == sound[0]) for rank in range(len(samples))]
    return [samples[rank] / total if rank in sound else 0.0 for rank in range(len(samples))]


def left_out(samples: Sequence[float], are_finite: Sequence[bool]) -> list[int]:
    """Give the members that have trained, and have no share because theirs is not finite."""
    if not any(are_finite):
        return []
    return [rank for rank, is_finite in enumerate(are_finite) if samples[rank] and not is_finite]


def _told(
    group: distributed.ProcessGroup, device: torch.device, *, samples: float, is_finite: bool
) -> tuple[list[float], list[bool]]:
    """Tell all members what this one has seen, and whether its part is finite, and hear theirs."""
    facts = torch.zeros(2, distributed.get_world_size(group), dtype=torch.float64, device=device)
    facts[:, distributed.get_rank(group)] = torch.tensor([samples, is_finite], dtype=torch.float64)
    distributed.all_reduce(facts, group=group)
    counts, are_finite = facts.tolist()
    return counts, [bool(one) for one in are_finite]


def _bits(tensor: torch.Tensor) -> str:
    """Give a digest of a tensor's values."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()  # else bits are of what it is a view of
    if is_plain(values):
        parts = [values]
    elif values.is_quantized or values.is_nested:
        kept = io.BytesIO()
        torch.save(values, kept)
        return hashlib.sha256(kept.getbuffer()).hexdigest()
    else:
        sparse = values.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        parts = [sparse.indices(), sparse.values()]
    seen = hashlib.sha256()
    for part in parts:
        seen.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest()
