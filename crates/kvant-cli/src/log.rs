//! Logs to standard error without blocking or failing the work that is logged.
//!
//! A closed reader, a full disk or a stopped terminal must not delay requests. A separate thread writes the lines of a
//! server. Lines that exceed its queue are dropped and counted.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use tracing_subscriber::filter::LevelFilter;

/// Maximum lines in the queue.
const MAX_QUEUED: usize = 4096;
/// Maximum time that the end of the process waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The minimum level of logged lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> LevelFilter {
        match level {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}

enum Entry {
    Line(Vec<u8>),
    /// Signals that all earlier lines have been written.
    Flush(SyncSender<()>),
}

/// Writes log lines in a separate thread. Every write succeeds.
#[derive(Clone)]
pub struct LogWriter {
    lines: SyncSender<Entry>,
    /// Number of lines dropped since the last written one.
    lost: Arc<AtomicU64>,
}

impl LogWriter {
    /// Starts the thread. If that fails, lines are dropped.
    pub fn new(out: impl Write + Send + 'static) -> LogWriter {
        let (lines, received) = sync_channel(MAX_QUEUED);
        let lost = Arc::new(AtomicU64::new(0));
        let of_thread = Arc::clone(&lost);
        let _ = thread::Builder::new().name("kvant-log".to_string()).spawn(move || write(out, &received, &of_thread));
        LogWriter { lines, lost }
    }

    /// Waits until all earlier lines are written, for at most [`LAST_LINES`].
    pub fn flush(&self) {
        let (end, (done, waiting)) = (Instant::now() + LAST_LINES, sync_channel(1));
        let mut entry = Entry::Flush(done);
        while let Err(TrySendError::Full(full)) = self.lines.try_send(entry) {
            if Instant::now() >= end {
                return;
            }
            entry = full;
            thread::sleep(Duration::from_millis(2));
        }
        let _ = waiting.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

fn write(mut out: impl Write, received: &Receiver<Entry>, lost: &AtomicU64) {
    for entry in received {
        match entry {
            // A line that cannot be written is dropped and counted. The next one may succeed, for example if the disk
            // has space again.
            Entry::Line(line) => {
                if out.write_all(&line).and_then(|()| out.flush()).is_err() {
                    lost.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let count = lost.swap(0, Ordering::Relaxed);
                if count > 0 && writeln!(out, "{count} log lines were lost: not read or not writable").is_err() {
                    lost.fetch_add(count, Ordering::Relaxed);
                }
            }
            Entry::Flush(done) => drop(done.try_send(())),
        }
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.try_send(Entry::Line(line.to_vec())).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, atomic::AtomicBool};

    use super::*;

    /// Stores written data once a gate has opened.
    #[derive(Clone, Default)]
    struct Sink {
        written: Arc<Mutex<Vec<u8>>>,
        gate: Arc<Mutex<()>>,
        fails: Arc<AtomicBool>,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _open = self.gate.lock().unwrap();
            if self.fails.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.written.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_in_order() {
        let sink = Sink::default();
        let mut log = LogWriter::new(sink.clone());
        for line in 0..100 {
            writeln!(log, "{line}").unwrap();
        }
        log.flush();
        let want: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert_eq!(String::from_utf8(sink.written.lock().unwrap().clone()).unwrap(), want);
    }

    #[test]
    fn a_slow_reader_costs_lines_and_no_time() {
        let sink = Sink::default();
        let closed = sink.gate.lock().unwrap();
        let mut log = LogWriter::new(sink.clone());
        for _ in 0..3 * MAX_QUEUED {
            log.write_all(b"line\n").unwrap();
        }
        drop(closed);
        log.flush();
        log.write_all(b"last\n").unwrap();
        log.flush();
        let written = String::from_utf8(sink.written.lock().unwrap().clone()).unwrap();
        assert!(written.contains("log lines were lost") && written.contains("last\n"), "{} bytes", written.len());
        assert!(written.lines().count() <= MAX_QUEUED + 4);
    }

    #[test]
    fn a_full_disk_is_no_error() {
        let sink = Sink::default();
        sink.fails.store(true, Ordering::Relaxed);
        let mut log = LogWriter::new(sink.clone());
        for _ in 0..10 {
            log.write_all(b"line\n").unwrap();
        }
        log.flush();
        sink.fails.store(false, Ordering::Relaxed);
        log.write_all(b"last\n").unwrap();
        log.flush();
        let written = String::from_utf8(sink.written.lock().unwrap().clone()).unwrap();
        assert!(written.starts_with("last\n10 log lines were lost"), "{written}");
    }
}
