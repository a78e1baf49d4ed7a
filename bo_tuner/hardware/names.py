"""`find_device`: the data sheet of a device, by whatever name people, tables and drivers give it."""

from __future__ import annotations

import re
from dataclasses import replace

from bo_tuner.hardware.catalogue import CATALOGUE, DeviceSheet
from bo_tuner.text import did_you_mean

__all__ = ["find_device"]

_SAYS_NOTHING = re.compile(r"nvidia|tesla|geforce|gpu|core|sxm\d?|hbm\d?e?")
_MEMORY = re.compile(r"(\d+)gb")


def find_device(name: str) -> tuple[DeviceSheet | None, str]:
    """The data sheet of `h100_80gb`, `A100`, `NVIDIA A100-SXM4-80GB` or `V100+T4`.

    Of several devices, joined by + or /, every figure is that of the slowest.

    Returns:
        The sheet, and one line on what was supposed, empty when nothing was. None when a device is unknown; then the line
        names the nearest.
    """
    members: dict[str, DeviceSheet] = {}
    notes: list[str] = []
    for part in (part.strip() for part in re.split(r"[+/,]", name)):
        sheet, note = _one(part)
        if sheet is None:
            near = did_you_mean("-".join(_telling(part)).upper(), CATALOGUE)
            return None, f"no figures are known of {part!r}{near}; they are of {', '.join(CATALOGUE)}"
        members[sheet.name] = sheet
        notes += [note] if note else []
    if len(members) > 1:
        notes.append(f"every figure is that of the slowest of {' and '.join(sorted(members))}")
    return _slowest([members[name] for name in sorted(members)]), "; ".join(dict.fromkeys(notes))


def _telling(name: str) -> list[str]:
    """The words that tell devices apart, in lower case, the memory as one word: `a100`, `80gb`."""
    spaced = " ".join(re.findall(r"[a-z0-9]+", name.lower().replace("rtx", " ")))
    words = re.sub(r"\b(\d+) ?(?:gib|gb|g)\b", r"\1gb", spaced).split()
    return [word for word in words if not _SAYS_NOTHING.fullmatch(word)]


def _one(name: str) -> tuple[DeviceSheet | None, str]:
    words = _telling(name)
    memory = [int(match[1]) for word in words if (match := _MEMORY.fullmatch(word))]
    chip = [word for word in words if word != "pcie" and not _MEMORY.fullmatch(word)]
    found = [sheet for sheet in CATALOGUE.values() if chip == _chip(sheet) and all(_has(sheet, gib) for gib in memory)]
    if not found:
        return None, ""
    sheet = found[0]
    note = f"{name} is taken as {sheet.name}" if len(found) > 1 else ""
    if "pcie" in words and sheet.link_kind == "NVLink":
        sheet = replace(sheet, name=f"{sheet.name}-PCIe", link_kind="PCIe", link_bytes_per_s=sheet.pcie_bytes_per_s)
        note = f"{name} is taken as {sheet.name}, and that for as fast as the module with NVLink, which it is not quite"
    return sheet, note


def _chip(sheet: DeviceSheet) -> list[str]:
    return [word for word in _telling(sheet.name) if not _MEMORY.fullmatch(word)]


def _has(sheet: DeviceSheet, gib: int) -> bool:
    """It is sold with so much; what a driver shows may be a little less."""
    return 0.9 * gib <= sheet.memory_bytes / 2**30 <= gib


def _slowest(sheets: list[DeviceSheet]) -> DeviceSheet:
    """The worst of every figure."""
    if len(sheets) == 1:
        return sheets[0]
    precisions = [key for key in sheets[0].peak_flops_per_s if all(key in sheet.peak_flops_per_s for sheet in sheets)]
    link = min(sheets, key=lambda sheet: sheet.link_bytes_per_s)
    return DeviceSheet(
        name=" + ".join(sheet.name for sheet in sheets),
        memory_bytes=min(sheet.memory_bytes for sheet in sheets),
        memory_bytes_per_s=min(sheet.memory_bytes_per_s for sheet in sheets),
        peak_flops_per_s={key: min(sheet.peak_flops_per_s[key] for sheet in sheets) for key in precisions},
        link_kind=link.link_kind,
        link_bytes_per_s=link.link_bytes_per_s,
        pcie_bytes_per_s=min(sheet.pcie_bytes_per_s for sheet in sheets),
        node_size=min(sheet.node_size for sheet in sheets),
        network_bytes_per_s=min(sheet.network_bytes_per_s for sheet in sheets),
        source="; ".join(dict.fromkeys(sheet.source for sheet in sheets)),
        node_source="; ".join(dict.fromkeys(sheet.node_source for sheet in sheets)),
    )
