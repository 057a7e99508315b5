//! Files that are on the disk when they say so, and that are what they seem.

use super::error::DirectoryError;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File, OpenOptions};
use std::io;
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
    let file = File::from(rustix::io::retry_on_intr(open)?);
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no plain file"))
}

/// Removes a directory with what is in it, if it is there.
pub(super) fn remove(path: &Path) -> Result<(), DirectoryError> {
    match fs::remove_dir_all(path) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(DirectoryError::io("remove", path)(cause))
        }
        _ => Ok(()),
    }
}
