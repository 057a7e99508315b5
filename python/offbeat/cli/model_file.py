"""A model as a .safetensors file, read and written without torch. Loading one runs no code."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.arrays import as_array, contiguous
from offbeat.dtypes import NAMES
from offbeat.errors import ConfigError

__all__ = ["ModelLeftError", "Place", "check_writable", "copy", "load", "save"]

TORCHS = (b"PK", b"\x80\x02")
"""How a file of `torch.save` begins: today's are zip archives, older ones pickles."""
TORCHS_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What may be where a file is to be, in words."""

BFLOAT16, PLAIN_UINT16 = "bf16", "u16"  # as `offbeat.arrays` calls them


class ModelLeftError(OSError):
    """A model that is written and could not take its file's place stays where it is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is to be at the end, when the working directory may have another name, or be gone."""

    given: Path
    begun_in: Path

    def path(self) -> Path:
        """Give it as it is now."""
        try:
            Path.cwd()
        except OSError:
            return Path(os.path.realpath(self.begun_in / self.given))
        return self.given


def load(path: Path) -> dict[str, Any]:
    """Read the tensors of a file, in its order.

    Raises:
        ConfigError: If it is not a .safetensors file, or holds what numpy cannot.
        OSError: If it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"--model: there is no file {path}")
    _register_bfloat16()
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, AttributeError, KeyError, TypeError) as error:
        with path.open("rb") as file:
            if file.read(2) in TORCHS:
                raise ConfigError(
                    f"--model: {path} looks like a file of torch.save and not .safetensors: convert it in "
                    f"Python, with safetensors.torch.save_file(torch.load({str(path)!r}), "
                    f"{str(path.with_suffix('.safetensors'))!r}) where it holds a state_dict"
                ) from error
        raise ConfigError(f"--model: {path} cannot be read as .safetensors: {error}") from error


def save(
    state: Mapping[str, Any], path: Path, *, before_replacing: Callable[[], object] = lambda: None
) -> None:
    """Write tensors to a file, beside it first, so that a reader never finds half of it.

    Args:
        state: Arrays or tensors by name, as `ParameterServer.state_dict` gives them; what is uint16 there is
            bfloat16 on a machine whose numpy does not know it.
        path: The file; replaced if it is there. Of a symbolic link, the file that it leads to. Its folder is
            made again if it is gone.
        before_replacing: Called when nothing is left to do but that.

    Raises:
        ModelLeftError: If it is written and cannot be put there, as where there is no file by now.
        OSError: If it cannot be written.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    arrays = {}
    specs = {}
    for name, value in state.items():
        array, code = as_array(name, value)
        arrays[name] = array = contiguous(array)  # kept as long as the specs point to them
        specs[name] = TensorSpec(
            dtype=NAMES[BFLOAT16 if code == PLAIN_UINT16 else code],
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )

    def write(whole: Path) -> None:
        try:
            serialize_file(specs, whole, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk, too
            raise OSError(str(error)) from error

    _put(path, write, before_replacing)


def copy(source: Path, path: Path, *, before_replacing: Callable[[], object] = lambda: None) -> None:
    """Copy a model's file as `save` writes one: a reader never finds half of it.

    Raises:
        ModelLeftError: As `save`.
        OSError: If it cannot be read or written.
    """
    _put(path, lambda whole: shutil.copyfile(source, whole), before_replacing)


def _put(path: Path, write: Callable[[Path], object], before_replacing: Callable[[], object]) -> None:
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(target) as folder:
            whole = folder / "model.safetensors"
            write(whole)
            with whole.open("rb") as written:
                os.fsync(written.fileno())
            _permit_as(target, whole)
            before_replacing()
            _replace(target, whole)
    except ModelLeftError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _replace(target: Path, new: Path) -> None:
    try:
        _refuse_what_is_no_file(target)
        new.replace(target)
    except OSError as error:  # such as of a file that is mounted by itself, as containers do
        raise ModelLeftError(
            error.errno, f"{error.strerror}; it is left in {new}, not in", str(target)
        ) from error


def check_writable(path: Path, option: str = "--save") -> None:
    """Refuse, before hours of training, a file that could not be written after them, or read as what it says.

    Args:
        path: The file.
        option: What it was given to, for errors.

    Raises:
        ConfigError: If its folder is not there, if what is there is no file or may not be written, if nothing
            can be made there, or its name is one of a torch file.
    """
    if path.suffix.lower() in TORCHS_SUFFIXES:
        raise ConfigError(
            f"{option}: {path} would hold .safetensors, which torch.load does not read: name it "
            f"{path.with_suffix('.safetensors')}, and read it with safetensors.torch.load_file"
        )
    try:
        _refuse_what_is_no_file(path)
        target = _target(path)
        if not target.parent.is_dir():
            raise ConfigError(f"{option}: there is no folder {target.parent}")
        if target.exists() and not os.access(target, os.W_OK):  # which replacing it would not ask
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        with _folder_beside(target) as folder:  # as `save` will do, but where nobody sees the empty file
            empty = folder / "model"
            empty.touch()
            _permit_as(target, empty)
            empty.replace(folder / target.name)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error


def _target(path: Path) -> Path:
    """Follow symbolic links to where a file is to be."""
    return Path(os.path.realpath(path))


def _refuse_what_is_no_file(path: Path) -> None:
    """Let there be a file or nothing: it will be replaced.

    Raises:
        OSError: If it is something else, or nobody can say.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return  # nothing is there, or the last link leads to nothing: it will be a file
    if not stat.S_ISREG(mode):
        what = KINDS.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"it is {what}, and only a file can be replaced by a model", str(path))


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Make a folder for a file that will replace another, on its disk; it goes with what is left in it.

    Its name is short, whatever the file's: that may be as long as a name can be.
    """
    folder = target.parent / f".offbeat-{secrets.token_hex(16)}"
    try:
        folder.mkdir(mode=0o700)  # in here: a signal may come when it is made
        yield folder
    except ModelLeftError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _permit_as(target: Path, new: Path) -> None:
    """Let those use a file, which is its owner's alone as yet, who may use the one that it will replace.

    Where there is none, those whom the umask leaves.
    """
    if not target.is_file():
        mask = os.umask(0)
        os.umask(mask)
        new.chmod(0o666 & ~mask)
        return
    before = target.stat()
    mode = before.st_mode & 0o777
    try:
        os.chown(new, -1, before.st_gid)  # which root may, and of groups their members
    except OSError:
        mode = mode & ~0o070 | (mode & 0o007) << 3  # our group is another: it is among the others there
    with contextlib.suppress(OSError):
        os.chown(new, before.st_uid, -1)
    new.chmod(mode)


def _register_bfloat16() -> None:
    """Let numpy know bfloat16 where `ml_dtypes` is installed; importing it is all it takes."""
    import importlib

    try:
        importlib.import_module("ml_dtypes")
    except ImportError:
        return
