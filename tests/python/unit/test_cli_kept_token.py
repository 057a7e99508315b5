"""The token beside the checkpoints: whole or not there, its owner's alone, and never believed else."""

import os
import stat

import pytest

from offbeat.cli import kept_token
from offbeat.errors import CheckpointError

TOKEN = "0123456789abcdef" * 2


def kept(directory, text=f"{TOKEN}\n", mode=0o600):
    path = directory / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_written_is_read_again_and_is_its_owner_s_alone(tmp_path):
    assert kept_token.read(str(tmp_path)) is None
    before = os.umask(0)
    try:
        kept_token.write(str(tmp_path), TOKEN)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert kept_token.read(str(tmp_path)) == TOKEN
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_what_a_start_that_was_broken_off_has_left_is_in_nobody_s_way(tmp_path):
    (tmp_path / "token.new").write_text("half")
    kept_token.write(str(tmp_path), TOKEN)
    assert kept_token.read(str(tmp_path)) == TOKEN
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_one_that_others_may_have_read_or_changed_is_refused_with_its_mode_and_not_shown(tmp_path, mode):
    path = kept(tmp_path, mode=mode)
    with pytest.raises(CheckpointError) as caught:
        kept_token.read(str(tmp_path))
    said = str(caught.value)
    assert f"{path} may be read or changed by others (mode {mode:04o})" in said
    assert "remove it" in said
    assert "chmod 600" in said
    assert TOKEN not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_one_of_another_user_is_refused(tmp_path):
    os.chown(kept(tmp_path), 12345, -1)
    with pytest.raises(CheckpointError, match=r"belongs to another user \(uid 12345\)"):
        kept_token.read(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        TOKEN,
        TOKEN[:-1] + "\n",
        TOKEN + "\n\n",
        TOKEN.upper() + "\n",
        "\0" * 33,
        (TOKEN + "\n") * 99,
    ],
)
def test_one_that_is_damaged_is_refused_with_the_remedy_and_not_shown(tmp_path, text):
    path = kept(tmp_path, text)
    with pytest.raises(CheckpointError) as caught:
        kept_token.read(str(tmp_path))
    assert str(caught.value).startswith(f"{path} is damaged: ")
    assert "remove it, and the next start makes a new one" in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a FIFO", "a folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "token")
    with pytest.raises(CheckpointError, match="is no file"):
        kept_token.read(str(tmp_path))


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "token").symlink_to(kept(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        kept_token.read(str(tmp_path))


def test_one_that_cannot_be_written_is_told_with_its_file_and_another_way(tmp_path):
    (tmp_path / "token.new").mkdir()
    with pytest.raises(CheckpointError) as caught:
        kept_token.write(str(tmp_path), TOKEN)
    assert f"{tmp_path}/token, where the token of --new-token is kept" in str(caught.value)
    assert "OFFBEAT_TOKEN" in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert not (tmp_path / "token").exists()


def test_one_that_another_start_has_kept_meanwhile_is_not_replaced(tmp_path):
    kept_token.write(str(tmp_path), TOKEN)
    with pytest.raises(CheckpointError, match="has come since this start looked for it") as caught:
        kept_token.write(str(tmp_path), kept_token.made_up())
    assert TOKEN not in str(caught.value)
    assert kept_token.read(str(tmp_path)) == TOKEN
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_each_token_is_another_and_is_one_that_can_be_kept(tmp_path):
    tokens = {kept_token.made_up() for _ in range(100)}
    assert len(tokens) == 100
    kept_token.write(str(tmp_path), tokens.pop())
