"""Facts about kernels in a server's log: version, arguments, chosen kernels, tuned files that were read or missed.

Lines of vLLM 0.25.1 and 0.33.0 (`Selected NAME for MODULE`, `Using NAME Fp8 MoE backend out of ...`, `non-default
args`) and of SGLang 0.5.23 (`server_args=...`), which does not name the kernels of layers.
"""

import ast
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gemmpipe.core.errors import UserError
from gemmpipe.core.jsonstream import open_text
from gemmpipe.engines.kernel_choice import BLOCKS, EXPERTS_BLOCKS, EXPERTS_SIXTEEN, ROWS
from gemmpipe.engines.packages import SGLANG, VLLM

_MAX_BYTES = 1_000_000_000
"""The largest log, in bytes."""
_MAX_LINE = 1 << 16
"""Characters of a line that are read at once."""
_MAX_FILES = 10_000
_VERSION = re.compile(
    r"LLM engine \(v(?P<vllm>[0-9][^\s()]{0,40})\)|\bsglang(?:_| )?version[ =:'\"]{1,4}(?P<sglang>[0-9][\w.+]{0,40})"
)
_SELECTED = re.compile(r"Selected (?P<kernel>\w{1,120}) for (?P<module>\w{1,120})")
_EXPERTS_BACKEND = re.compile(r"Using '?(?P<kernel>[\w ]{1,60}?)'? (?P<kind>Fp8|FP8|Unquantized) MoE backend")
_READ = re.compile(
    r"(?:Using configuration|Using MoE kernel config|use MoE kernel config) from (?P<path>[^\n]{1,1000}?\.json)"
)
_DEVICE = re.compile(
    r"device_name=(?P<file>[^,/\n]{1,100}?)(?:,|\.json)"
    r"|gemmpipe \S{1,40} in \w{4,6} \S{1,40} on (?P<plugin>[^:\n]{1,100}):"
)
_MISSING = re.compile(r"[Cc]onfig file not found at (?P<path>[^\n]{1,2000}?\.json)")
_ARGUMENTS = re.compile(r"non-default args: (?P<vllm>\{.*\})")
_SGLANG_ARGUMENT = re.compile(
    r"\b(?P<name>fp8_gemm_runner_backend|moe_runner_backend|moe_a2a_backend|ep_size|tp_size|model_path)'?"
    r"(?:=|: )(?P<value>'[^']{0,500}'|[\w.]{1,40})"
)
_ALIASES = {"fp8_gemm_runner_backend": "fp8_gemm_backend"}
_PLUGIN = re.compile(r"gemmpipe \S{1,40} in (?:vLLM|SGLang)[^\n]{0,2000}")


@dataclass(kw_only=True, eq=False)
class ServerLog:
    """The lines of one log about kernels."""

    engine: str | None = None
    """The engine by its lines; None if no line is an engine's."""
    version: str | None = None
    flags: dict[str, str] = field(default_factory=dict)
    """Arguments of the server by name, as `Situation.flags`."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """The kernels by module or kind of layer, as the engine names both: one for each size that needs another."""
    device: str = ""
    """The device's name, by the names of files or the plug-in's line."""
    read: list[str] = field(default_factory=list)
    """Tuned files that were read, in order."""
    missing: list[str] = field(default_factory=list)
    """Tuned files that were looked for."""
    plugin: list[str] = field(default_factory=list)
    """The start lines of gemmpipe's plug-in."""

    def add(self, line: str) -> None:
        """Take what a line states."""
        if match := _VERSION.search(line):
            self.engine = VLLM if match["vllm"] else SGLANG
            self.version = match["vllm"] or match["sglang"]
        if match := _SELECTED.search(line):
            self.engine = self.engine or VLLM
            _append(self.kernels.setdefault(match["module"], []), match["kernel"])
        if match := _EXPERTS_BACKEND.search(line):
            self.engine = self.engine or VLLM
            kind = EXPERTS_SIXTEEN if match["kind"] == "Unquantized" else EXPERTS_BLOCKS
            _append(self.kernels.setdefault(kind, []), match["kernel"])
        if match := _READ.search(line):
            _append(self.read, match["path"])
        if match := _MISSING.search(line):  # vLLM lists every folder with this name: the first one is taken
            _append(self.missing, match["path"])
        if not self.device and (match := _DEVICE.search(line)):
            self.device = (match["file"] or match["plugin"]).replace("_", " ")
        if match := _PLUGIN.search(line):
            _append(self.plugin, match[0])
        self._add_arguments(line)

    def _add_arguments(self, line: str) -> None:
        if match := _ARGUMENTS.search(line):
            self.engine = self.engine or VLLM
            self.flags.update(_literal(match["vllm"]))
        if "server_args=" in line:
            self.engine = self.engine or SGLANG
            for found in _SGLANG_ARGUMENT.finditer(line):
                name = found["name"]
                self.flags.setdefault(_ALIASES.get(name, name), found["value"].strip("'"))

    def kernels_of(self, kind: str) -> tuple[str, ...]:
        """The kernels that the log names for a kind of layers, in order."""
        if kind in self.kernels:
            return tuple(self.kernels[kind])
        named = (kernel for module, kernels in self.kernels.items() if "Fp8" in module for kernel in kernels)
        return tuple(dict.fromkeys(each for each in named if kind == (BLOCKS if "Block" in each else ROWS)))


def _append(found: list[str], path: str) -> None:
    if path not in found and len(found) < _MAX_FILES:
        found.append(path)


def _literal(text: str) -> Mapping[str, str]:
    """The entries of a logged dict with plain values; none if it cannot be read (objects in it)."""
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = re.findall(r"'(\w{1,60})': ('[^']{0,500}'|[\w.]{1,60})", text)
        return {name: value.strip("'") for name, value in pairs}
    if not isinstance(values, dict):
        return {}
    return {str(name): str(value) for name, value in values.items() if isinstance(value, str | int | float | bool)}


def read_server_log(path: Path) -> ServerLog:
    """Read a log, compressed or not. Raises UserError if it cannot be read, or has no line of an engine."""
    log = ServerLog()
    for _, line in log_lines(path):
        log.add(line)
    if log.engine is None and not (log.read or log.missing):
        raise UserError(f"log={path}: no line of vLLM or SGLang about its kernels; expected the log of a server")
    return log


def log_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of a log's lines, compressed or not; undecodable bytes are replaced.

    Raises UserError for a file that cannot be read, or is too large.
    """
    large = UserError(f"{path}: larger than {_MAX_BYTES:,} bytes, expected a server's log; cut it to its new part")
    try:
        if path.is_file() and path.stat().st_size > _MAX_BYTES:
            raise large
        with open_text(path, errors="replace") as stream:
            number = total = 0
            while line := stream.readline(_MAX_LINE):
                number, total = number + 1, total + len(line)
                if total > _MAX_BYTES:  # of a compressed log
                    raise large
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
