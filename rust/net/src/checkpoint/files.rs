//! Files that are on the disk when they say so, and that are what they seem.

use super::error::DirectoryError;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, unlinkat};
use rustix::io::{Errno, retry_on_intr};
use rustix::path::Arg;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

/// Makes a new file for `write`, and returns when its bytes are on the disk.
pub(super) fn write_new<T>(
    path: &Path,
    write: impl FnOnce(&File) -> Result<T, DirectoryError>,
) -> Result<T, DirectoryError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(DirectoryError::io("create", path))?;
    let written = write(&file)?;
    file.sync_all().map_err(DirectoryError::io("write", path))?;
    Ok(written)
}

/// Makes a directory, and those above it that are not there, and returns when their names are on the disk.
pub(super) fn create_directories(path: &Path) -> Result<(), DirectoryError> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    fs::create_dir_all(path).map_err(DirectoryError::io("create", path))?;
    for made in missing {
        let above = made.parent().filter(|above| !above.as_os_str().is_empty());
        sync_names(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

/// Returns when the names in a directory are on the disk.
pub(super) fn sync_names(path: &Path) -> Result<(), DirectoryError> {
    match File::open(path).and_then(|directory| directory.sync_all()) {
        // Some file systems of the network and of user space have nothing to do there, and say so.
        Err(cause) if cause.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.map_err(DirectoryError::io("write", path)),
    }
}

/// Opens a file to read it: no link, no pipe, no device.
pub(super) fn open(path: &Path) -> io::Result<File> {
    open_plain(path, OFlags::RDONLY)
}

/// Opens a file to lock it, and makes it where it is not there; what it holds stays as it is.
pub(super) fn open_lock(path: &Path) -> io::Result<File> {
    open_plain(path, OFlags::RDWR | OFlags::CREATE)
}

fn open_plain(path: &Path, how: OFlags) -> io::Result<File> {
    let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = || rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(retry_on_intr(open)?);
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no plain file"))
}

/// The names in a directory. The standard library's way to them panics where a directory cannot be closed.
pub(super) fn names(path: &Path) -> io::Result<Vec<CString>> {
    Ok(names_in(&mut open_directory(CWD, path, OFlags::empty())?)?)
}

/// Removes a directory with what is in it, if it is there.
pub(super) fn remove(path: &Path) -> Result<(), DirectoryError> {
    match remove_directory(CWD, path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(cause) => Err(DirectoryError::io("remove", path)(cause.into())),
    }
}

fn remove_directory(place: impl AsFd, path: impl Arg + Copy) -> rustix::io::Result<()> {
    let mut directory = open_directory(&place, path, OFlags::NOFOLLOW)?;
    for name in names_in(&mut directory)? {
        match unlinkat(directory.fd()?, &name, AtFlags::empty()) {
            Err(Errno::ISDIR) => remove_directory(directory.fd()?, &*name)?,
            removed => removed?,
        }
    }
    unlinkat(place, path, AtFlags::REMOVEDIR)
}

fn open_directory(place: impl AsFd, path: impl Arg + Copy, how: OFlags) -> rustix::io::Result<Dir> {
    let flags = how | OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Dir::new(retry_on_intr(|| openat(&place, path, flags, Mode::empty()))?)
}

fn names_in(directory: &mut Dir) -> rustix::io::Result<Vec<CString>> {
    let mut names = Vec::new();
    while let Some(entry) = directory.read() {
        let entry = entry?;
        if ![c".", c".."].contains(&entry.file_name()) {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}
