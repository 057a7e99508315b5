//! What to do where the operating system's limits are met.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// What the system says, with the remedy where it is this process's to know.
pub(crate) fn explained(error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE) => {
            let limit = getrlimit(Resource::Nofile).current;
            let limit = limit.map_or_else(String::new, |limit| format!(" of {limit}"));
            format!(
                "{error}: this process has reached its limit{limit}; raise it with ulimit -n before the start"
            )
        }
        Some(Errno::NFILE) => format!("{error}: the whole machine has reached its limit, fs.file-max"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_too_many_files_open_is_told_how_to_have_more() {
        let told = explained(&io::Error::from_raw_os_error(Errno::MFILE.raw_os_error()));
        assert!(told.contains("ulimit -n"), "{told}");
        let other = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert_eq!(explained(&other), other.to_string());
    }
}
