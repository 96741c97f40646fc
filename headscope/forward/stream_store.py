"""Residual streams of many layers, in memory as far as they fit, else on disk."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor


class ResidualStreamStore:
    """Residual streams [1, L, D] by layer: the first `memory_bytes` in memory, the rest on disk."""

    def __init__(self, memory_bytes: float):
        self.memory_bytes, self.bytes_in_memory = memory_bytes, 0
        self._entries: list[Tensor | tuple[Path, torch.device]] = []
        self._temporary_directory: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, stream: Tensor) -> None:
        size = stream.numel() * stream.element_size()
        if self.bytes_in_memory + size <= self.memory_bytes:
            self.bytes_in_memory += size
            self._entries.append(stream)
            return
        if self._temporary_directory is None:
            self._temporary_directory = tempfile.TemporaryDirectory(prefix="headscope-", ignore_cleanup_errors=True)
        file = Path(self._temporary_directory.name) / f"{len(self._entries)}.pt"
        torch.save(stream.cpu(), file)
        self._entries.append((file, stream.device))

    def load(self, layer: int) -> Tensor:
        entry = self._entries[layer]
        if isinstance(entry, Tensor):
            return entry
        file, device = entry
        stream: Tensor = torch.load(file, weights_only=True).to(device)
        return stream
