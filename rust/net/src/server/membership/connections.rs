//! What a worker is reached by.

use crate::server::connection::Connection;
use offbeat_core::wire::message::RefusalCode;
use std::net::Shutdown;
use std::sync::Arc;

/// A worker's connections, as far as they still stand.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) data: Option<Arc<Connection>>,
    pub(crate) control: Option<Arc<Connection>>,
}

impl Connections {
    pub(crate) fn have_ended(&self) -> bool {
        self.data.is_none() && self.control.is_none()
    }

    /// Ends them in both directions: nothing is waited for.
    pub(crate) fn cut(&self, code: RefusalCode, cause: &str) {
        for connection in [&self.data, &self.control].into_iter().flatten() {
            connection.close(code, cause, Shutdown::Both);
        }
    }

    /// Ends them, but for one that has ended already.
    pub(crate) fn close(&self, code: RefusalCode, cause: &str, but: Option<&Arc<Connection>>) {
        for connection in [&self.data, &self.control].into_iter().flatten() {
            if !but.is_some_and(|ended| Arc::ptr_eq(ended, connection)) {
                connection.close(code, cause, Shutdown::Read);
            }
        }
    }
}
