//! Where a worker stands in the store, once there is a model.

use super::end::End;
use super::model::Model;
use super::shared::Shared;
use crate::frame::FrameError;
use offbeat_core::layout::Presence;
use offbeat_core::store::WorkerKey;
use offbeat_core::wire::Header;
use offbeat_core::wire::message::RefusalCode;
use std::sync::Arc;

/// A session's place in the store.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) model: Arc<Model>,
    pub(super) key: WorkerKey,
    /// Every tensor: what most pushes bring.
    pub(super) all: Presence,
}

impl Place {
    /// A worker's place in the store, if there is a model.
    pub(super) fn of(
        shared: &Shared,
        worker_id: &str,
        incarnation: u32,
        header: &Header,
    ) -> Result<Option<Self>, End> {
        let Some(model) = shared.model.get() else { return Ok(None) };
        let mut members = shared.members();
        match members.register(incarnation, |id| model.store.register(id, incarnation)) {
            Some(Ok(key)) => {
                let all = Presence::all(model.store.layout().num_tensors());
                Ok(Some(Self { model: Arc::clone(model), key, all }))
            }
            Some(Err(full)) => Err(End::refused(header, RefusalCode::Full, full.to_string())),
            None if members.is_replaced(worker_id, incarnation) => {
                Err(End::refused(header, RefusalCode::Fenced, "a newer process has this worker's name"))
            }
            // Its other connection has ended, and this one is being ended for that, with the cause.
            None => Err(End::Frame(FrameError::Closed { inside: false })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Socket;
    use crate::server::connection::Connection;
    use crate::server::{Server, ServerConfig, Snapshot};
    use offbeat_core::dtype::Dtype;
    use offbeat_core::table::{Role, TensorSpec, TensorTable};
    use offbeat_core::wire::Kind;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    #[test]
    fn only_who_was_replaced_is_told_so() {
        let (name, dtype, role) = ("w".into(), Dtype::F32, Role::Parameter);
        let table = TensorTable::new(vec![TensorSpec { name, aliases: vec![], shape: vec![1], dtype, role }]);
        let model = Snapshot::of(table.unwrap(), &[vec![0; 4]]).unwrap();
        let server = Server::with_model(ServerConfig::default(), model).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connection = {
            let _on_its_runtime = server.control.enter();
            Arc::new(Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
        };
        let join = || {
            let (id, connection) = (Some("a".into()), Arc::clone(&connection));
            let joined =
                server.shared.members().join(id, (String::new(), None), [7; 16], connection, Instant::now());
            joined.incarnation
        };
        let place = |incarnation| Place::of(&server.shared, "a", incarnation, &Header::new(Kind::Call));
        let withdrawn = join();
        server.shared.lost(withdrawn, "its other connection", &connection);
        assert!(matches!(place(withdrawn), Err(End::Frame(FrameError::Closed { .. }))));
        let replaced = join();
        let newer = join();
        let told = place(replaced);
        assert!(matches!(told, Err(End::Refused { refused, .. }) if refused.code == RefusalCode::Fenced));
        assert!(matches!(place(newer), Ok(Some(_))));
    }
}
