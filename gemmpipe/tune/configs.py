"""Search spaces as lists of configurations, and configurations by bucket of M in JSON files that engines load."""

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gemmpipe.core.data import Bucket, Candidate
from gemmpipe.core.errors import UserError, short_repr
from gemmpipe.core.paths import write_atomic
from gemmpipe.formats.triton_json import Limit, bucket_ranges
from gemmpipe.tune.family_kernel import family_of_tag, tune_family_kernel
from gemmpipe.tune.kernel import Config, NoneValid, is_count

Tune = Callable[[int, int, int, Any, Sequence[Mapping[str, Any]]], Config]
"""(M, N, K, dtype, search space) -> the best configuration, for example a function around `tune_kernel`."""

_FULL: Mapping[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    "waves_per_eu": (1, 2, 4, 6, 8),
    "matrix_instr_nonkdim": (16,),
}
_SMALL: Mapping[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32),
    "BLOCK_SIZE_N": (32, 64),
    "BLOCK_SIZE_K": (64,),
    "GROUP_SIZE_M": (1,),
    "num_warps": (4,),
    "num_stages": (2, 3),
    "waves_per_eu": (2,),
    "matrix_instr_nonkdim": (16,),
}

_LOG = logging.getLogger("gemmpipe.tune")


def get_search_space(small: bool = False) -> list[Config]:
    """Every combination of the usual knobs of a tiled Triton GEMM: 28,125 of them, or 8 for a test (`small`)."""
    axes = _SMALL if small else _FULL
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def save_configs_to_json(
    json_file_name: str, save_path: str | Path, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> None:
    """Write `configs` to `save_path/json_file_name` atomically; a missing folder is made.

    Raises UserError for values that JSON cannot represent, OSError if the file cannot be written.
    """
    folder = Path(save_path).expanduser()
    try:
        text = json.dumps(configs, indent=4, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"{json_file_name}: {error}, expected numbers, texts, true, false or null") from None
    write_atomic(folder / json_file_name, text)


def tune_and_save_configs(
    batch_sizes: Iterable[int],
    N: int,
    K: int,
    dtype: Any,
    search_space: Sequence[Mapping[str, Any]],
    save_path: str | Path,
    device_name: str,
    tag: str,
    tune: Tune | None = None,
    buckets: str | Mapping[str, Limit] = "aiter",
) -> dict[str, Config]:
    """Call `tune(M, N, K, dtype, search_space)` for each M of `batch_sizes`; a configuration per bucket of M.

    Without `tune` the own kernel of the family at the start of `tag` is tuned (`A8W8_BLOCKSCALE-N=1024-K=1024`), as
    in aiter's scripts: see `family_kernel.tune_family_kernel`. A bucket that requires a knob's value (`medium_M32` of
    `atomic`: BLOCK_SIZE_M=32) is tuned over the configurations of the search space that have it.

    Written to `save_path/{device_name}-GEMM-{tag}.json` and returned. `buckets` is a preset of the Triton JSON format
    (`aiter`: small_M to 256, medium_M to 2048, large_M; `m_leq`; `atomic`) or a mapping like its `buckets` key. If
    several Ms are in a bucket, the largest counts. An M without a valid configuration, or without one that its bucket
    requires, is left out with a warning. Raises NoneValid if no M has a configuration, UserError for an invalid M,
    bucket or tag, and the exceptions of `tune`; the configurations found before one of these are logged.
    """
    ranges = bucket_ranges(buckets, "buckets")
    sizes = _sizes(batch_sizes)
    for name, value in (("N", N), ("K", K)):
        if not is_count(value):
            raise UserError(f"{name}: {short_repr(value)}, expected a whole number from 1")
    chosen = _family_kernel(tag) if tune is None else tune

    def tuned(m: int) -> Config:
        return _tune_checked(chosen, m, N, K, dtype, _for_bucket(m, ranges, search_space))

    found = _by_bucket(sizes, ranges, tuned, f"{tag} N={N} K={K}")
    if not found:
        raise NoneValid(f"N={N} K={K}: no M of {sizes} has a valid configuration")
    save_configs_to_json(f"{device_name}-GEMM-{tag}.json", save_path, found)
    return found


def _family_kernel(tag: str) -> Tune:
    family_of_tag(tag)  # an invalid tag is reported before anything runs
    return partial(tune_family_kernel, tag)


def _for_bucket(
    m: int, ranges: Sequence[Bucket], search_space: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The configurations that M's bucket accepts; all of them if it requires none."""
    bucket = next((each for each in ranges if each.contains(m)), None)
    if bucket is None or not bucket.required_knobs or not search_space:
        return search_space
    matching = [each for each in search_space if all(each.get(name) == value for name, value in bucket.required_knobs)]
    if not matching:
        required = ", ".join(f"{name}={value}" for name, value in bucket.required_knobs)
        raise NoneValid(f"no configuration of the search space has {required}, as {bucket.name} requires")
    return matching


def _sizes(batch_sizes: Iterable[int]) -> list[int]:
    listed = list(batch_sizes) if isinstance(batch_sizes, Iterable) else []
    if not listed or not all(map(is_count, listed)):
        raise UserError(f"batch_sizes: {short_repr(listed or batch_sizes)}, expected whole numbers from 1")
    return sorted(set(listed))


def _by_bucket(
    sizes: Sequence[int], ranges: Sequence[Bucket], tuned: Callable[[int], Config], title: str
) -> dict[str, Config]:
    from tqdm.auto import tqdm

    found: dict[str, Config] = {}
    for m in tqdm(sizes, desc=title, unit="size"):
        try:
            config = tuned(m)
        except NoneValid as error:
            _LOG.warning("M=%d: %s", m, error)
            continue
        except BaseException:
            if found:
                _LOG.warning("stopped at M=%d; found so far: %s", m, found)
            raise
        bucket = _bucket_of(m, config, ranges)
        if bucket is None:
            _LOG.warning("M=%d: %s fits no bucket", m, config)
        else:
            found[bucket.name] = config  # in the buckets' order, as the sizes ascend
    return found


def _tune_checked(tune: Tune, m: int, *rest: Any) -> Config:
    config = tune(m, *rest)
    if not isinstance(config, Mapping):
        raise UserError(f"tune: {short_repr(config)} returned for M={m}, expected a configuration")
    return config


def _bucket_of(m: int, config: Config, ranges: Sequence[Bucket]) -> Bucket | None:
    """The bucket that contains M, if it accepts this configuration."""
    candidate = Candidate.of("triton", config)
    return next((bucket for bucket in ranges if bucket.contains(m) and bucket.accepts(candidate)), None)
