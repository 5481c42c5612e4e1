"""Files in an engine's package: added, replaced with a backup, and restored."""

import json
from pathlib import Path

import pytest

from gemmpipe.core.errors import EnvironmentProblem, UserError
from gemmpipe.engines.install import BACKUP_SUFFIX, RECORD, install, undo
from gemmpipe.engines.packages import dense_folder, package_folder

NAME = "N=576,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
OTHER = NAME.replace("576", "512")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "vllm"
    configs = folder / "model_executor" / "layers" / "quantization" / "utils" / "configs"
    configs.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (configs / NAME).write_text('{"1": "the engine\'s own"}')
    return folder


def tuned(tmp_path: Path, text: str = '{"1": "ours"}') -> list[Path]:
    folder = tmp_path / "tuned"
    folder.mkdir(exist_ok=True)
    for name in (NAME, OTHER):
        (folder / name).write_text(text)
    return sorted(folder.iterdir())


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_was_replaced_comes_back(package: Path, tmp_path: Path) -> None:
    folder = dense_folder("vllm", package)
    before = contents(folder)
    done = {each.path.name: each.action for each in install(tuned(tmp_path), folder)}
    assert done == {NAME: "replaced", OTHER: "added"}
    assert contents(folder)[NAME + BACKUP_SUFFIX] == before[NAME]
    assert {each.path.name: each.action for each in undo(folder)} == {NAME: "restored", OTHER: "removed"}
    assert contents(folder) == before
    assert undo(folder) == []
    assert contents(folder) == before, "undoing twice changes nothing"


def test_a_second_installation_keeps_the_engines_own_backup(package: Path, tmp_path: Path) -> None:
    folder = dense_folder("vllm", package)
    before = contents(folder)
    install(tuned(tmp_path), folder)
    assert {each.action for each in install(tuned(tmp_path), folder)} == {"unchanged"}
    install(tuned(tmp_path, '{"1": "ours, newer"}'), folder)
    assert contents(folder)[NAME] == '{"1": "ours, newer"}'
    undo(folder)
    assert contents(folder) == before


def test_a_new_version_of_the_engines_file_is_the_backup(package: Path, tmp_path: Path) -> None:
    folder = dense_folder("vllm", package)
    install(tuned(tmp_path), folder)
    (folder / NAME).write_text('{"1": "of a newer engine"}')
    install(tuned(tmp_path), folder)
    undo(folder)
    assert contents(folder) == {NAME: '{"1": "of a newer engine"}'}


def test_a_file_that_changed_since_is_kept(package: Path, tmp_path: Path) -> None:
    folder = dense_folder("vllm", package)
    install(tuned(tmp_path), folder)
    (folder / NAME).write_text('{"1": "edited by hand"}')
    done = {each.path.name: each.action for each in undo(folder)}
    assert done == {NAME: "kept", OTHER: "removed"}
    assert contents(folder)[NAME] == '{"1": "edited by hand"}'
    assert contents(folder)[NAME + BACKUP_SUFFIX] == '{"1": "the engine\'s own"}', "nothing is lost"


def test_the_engines_keys_outside_of_the_tuned_ones_are_kept(package: Path, tmp_path: Path) -> None:
    folder = dense_folder("vllm", package)
    own = {str(m): {"BLOCK_SIZE_M": 1000 + m} for m in (1, 16, 32, 64, 4096)}
    (folder / NAME).write_text(json.dumps(own))
    ours = {str(m): {"BLOCK_SIZE_M": m} for m in (16, 64)}
    for _ in range(2):  # the second time from the backup
        (first,) = [each for each in install(tuned(tmp_path, json.dumps(ours)), folder) if each.path.name == NAME]
        assert first.kept_keys == 2
        found = json.loads((folder / NAME).read_text())
        assert {m: each["BLOCK_SIZE_M"] for m, each in found.items()} == {"1": 1001, "16": 16, "64": 64, "4096": 5096}
        assert list(found) == ["1", "16", "64", "4096"]
    assert json.loads((folder / OTHER).read_text()) == ours, "the engine has no file for this product"
    undo(folder)
    assert json.loads((folder / NAME).read_text()) == own


@pytest.mark.parametrize(
    "record", ["[]", "{}", '{"files": {"../../x": {"digest": "", "replaced": false}}}', '{"files": {"x": 1}}']
)
def test_a_damaged_record_removes_nothing(record: str, package: Path) -> None:
    folder = dense_folder("vllm", package)
    (folder / RECORD).write_text(record)
    with pytest.raises(UserError, match=RECORD):
        undo(folder)
    assert (folder / NAME).is_file()


def test_where_a_package_is(package: Path, tmp_path: Path) -> None:
    assert package_folder("vllm", str(package.parent)) == package
    assert package_folder("vllm", str(package)) == package
    with pytest.raises(UserError, match="no package 'sglang' there"):
        package_folder("sglang", str(package.parent))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    with pytest.raises(EnvironmentProblem, match="SGLang of unknown version has no folder"):
        dense_folder("sglang", tmp_path / "sglang")
