"""The launch line of a server that reads tuned files, and the folders of these files."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmpipe.core.shell import shell_join, shell_quote
from gemmpipe.engines.packages import PLACES, SGLANG, TITLES, VLLM

DENSE, EXPERTS = "dense", "experts"
"""The kinds of products that an engine's Triton functions compute."""
_MODEL = "MODEL"
"""The placeholder for an unknown model."""


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """A server that is launched: the engine, the model, and further arguments of its command line."""

    engine: str
    model: str = _MODEL
    arguments: tuple[str, ...] = ()

    def command(self, flags: Sequence[str], variables: Sequence[tuple[str, str]] = ()) -> str:
        """The launch line with these flags and environment variables."""
        start = {
            VLLM: ["vllm", "serve", self.model],
            SGLANG: ["python", "-m", "sglang.launch_server", "--model-path", self.model],
        }[self.engine]
        named = [f"{name}={shell_quote(value)}" for name, value in variables]
        return " ".join([*named, shell_join([*start, *self.arguments, *flags])])


_FLAGS = {
    (VLLM, DENSE): ("--linear-backend", "triton"),
    (VLLM, EXPERTS): ("--moe-backend", "triton"),
    (SGLANG, DENSE): ("--fp8-gemm-backend", "triton"),
    (SGLANG, EXPERTS): ("--moe-runner-backend", "triton"),
}
"""The flags that choose the Triton function, the only reader of tuned files (vLLM 0.25.1 to 0.33.0, SGLang 0.5.23)."""
_FOLDER_VARIABLES = {VLLM: "VLLM_TUNED_CONFIG_FOLDER", SGLANG: "SGLANG_MOE_CONFIG_DIR"}
"""The variable with the folder of experts' files; dense files have none."""


def triton_flags(engine: str, kinds: Collection[str]) -> tuple[str, ...]:
    """The flags with which the engine computes products of these kinds (`dense`, `experts`) with its Triton functions.

    They are absent from a default launch: on Hopper both engines prefer other kernels for dense products.
    """
    return tuple(word for kind in (DENSE, EXPERTS) if kind in kinds for word in _FLAGS[engine, kind])


def use_lines(
    server: ServerArguments,
    kinds: Collection[str],
    folder: Path,
    *,
    export: Sequence[str],
    installed: Path | None = None,
    package: str | None = None,
) -> list[str]:
    """Instructions for files of these kinds in `folder`: where to copy them, and the launch line.

    `export`: the arguments of the command that exports these choices; `installed`: the folder of the engine's package
    that holds the dense files now, if they were copied there; `package`: the package that the user named for it.
    """
    engine, title = server.engine, TITLES[server.engine]
    lines = []
    if DENSE in kinds and installed is None:
        command = shell_join([*export, "install=true"])
        lines.append(f"{title} reads files of dense products from its package alone, {PLACES[engine]}: {command}")
    if DENSE in kinds and installed is not None:
        named = [f"package={package}"] if package else []
        undo = shell_join(["gemmpipe", "export", engine, "undo=true", *named])
        lines.append(f"installed in {installed}; '{undo}' restores the engine's own files")
    variables = []
    if EXPERTS in kinds:
        variables.append((_FOLDER_VARIABLES[engine], str(folder.absolute())))
        if engine == SGLANG:
            lines.append("SGLANG_MOE_CONFIG_DIR replaces the folder of SGLang's own files for experts")
    lines.append(server.command(triton_flags(engine, kinds), variables))
    return lines


def plugin_switch(key_columns: Collection[str]) -> str:
    """The part of the plug-in that computes products with these key columns: `moe` or `linear`."""
    return "moe" if "expert" in key_columns else "linear"


def plugin_lines(server: ServerArguments, variable: str, table: Path, switch: str) -> list[str]:
    """The launch line of a server in which gemmpipe's plug-in computes the table's products."""
    name = {VLLM: "GEMMPIPE_VLLM", SGLANG: "GEMMPIPE_SGLANG"}[server.engine]
    return [server.command((), [(variable, str(table)), (name, switch)])]
