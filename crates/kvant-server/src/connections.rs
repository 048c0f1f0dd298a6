//! Connections: their number, and the time they wait for clients.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{self, Sleep},
};

use crate::ServerOptions;

/// Pause after a failed accept, for example when the process has too many open files.
const PAUSE: Duration = Duration::from_millis(200);

/// Serves connections until `closing` changes. Then it accepts no more, and waits until the open ones have written
/// their responses.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    options: &ServerOptions,
    mut closing: watch::Receiver<()>,
) {
    let free = Arc::new(Semaphore::new(options.connections.clamp(1, Semaphore::MAX_PERMITS)));
    let open = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(options.head_time);
    loop {
        let next = async {
            let place = Arc::clone(&free).acquire_owned().await;
            (accept(&listener).await, place)
        };
        let (stream, place) = tokio::select! {
            next = next => next,
            _ = closing.changed() => break,
        };
        let stream = TokioIo::new(Connection::new(stream, options.stall_time));
        let connection = open.watch(http.serve_connection(stream, TowerToHyperService::new(router.clone())));
        tokio::spawn(async move {
            // Errors here are the client's: it has disconnected, or does not speak HTTP.
            let _ = connection.await;
            drop(place);
        });
    }
    drop(listener);
    open.shutdown().await;
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Tokens are small, and each is sent without delay.
                let _ = stream.set_nodelay(true);
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                time::sleep(PAUSE).await;
            }
        }
    }
}

/// A connection that fails if its client does not read for too long.
struct Connection {
    stream: TcpStream,
    limit: Duration,
    /// Runs while a write is blocked.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    fn new(stream: TcpStream, limit: Duration) -> Connection {
        Connection { stream, limit, stalled: None }
    }

    /// Returns the result of a write, or an error after the limit.
    fn limited(&mut self, context: &mut Context<'_>, write: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if write.is_ready() {
            self.stalled = None;
            return write;
        }
        let limit = self.limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(time::sleep(limit)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.limited(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
