//! Loads and unloads small fake models whose memory is counted.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Bytes of all existing models, and their maximum.
#[derive(Default)]
struct Memory {
    used: AtomicUsize,
    max: AtomicUsize,
    loads: AtomicUsize,
    /// Number of the next loads that fail or panic.
    failures: AtomicUsize,
    panics: AtomicUsize,
}

struct Fake {
    bytes: usize,
    memory: Arc<Memory>,
}

impl Resident for Fake {
    fn end(self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

fn registry(limit: usize, bytes: &[usize]) -> (Registry<Fake>, Arc<Memory>) {
    let memory = Arc::new(Memory::default());
    let loader = |&bytes: &usize| {
        let memory = Arc::clone(&memory);
        let load = move || {
            memory.loads.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(2));
            let takes = |count: &AtomicUsize| {
                count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
            };
            assert!(!takes(&memory.panics), "a test has asked for this");
            if takes(&memory.failures) {
                return Err("no such file".to_string());
            }
            let used = memory.used.fetch_add(bytes, Ordering::SeqCst) + bytes;
            memory.max.fetch_max(used, Ordering::SeqCst);
            Ok(Fake { bytes, memory: Arc::clone(&memory) })
        };
        (bytes, Box::new(load) as Loader<Fake>)
    };
    (Registry::start(limit, bytes.iter().map(loader).collect()).unwrap(), memory)
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_clients_stay_within_the_limit() {
    let (registry, memory) = registry(10, &[4, 4, 5, 9]);
    let client = |number: usize| {
        let registry = registry.clone();
        tokio::spawn(async move {
            for round in 0..20 {
                let index = (number * 7 + round * 3) % 4;
                // Some give up early.
                let limit = if (number + round).is_multiple_of(5) { Duration::from_millis(1) } else { LONG };
                match registry.get(index, limit).await {
                    Ok(lease) => {
                        assert_eq!(lease.bytes, [4, 4, 5, 9][index]);
                        tokio::time::sleep(Duration::from_micros(300)).await;
                    }
                    Err(refused) => assert_eq!((refused, limit < LONG), (Refused::Late, true)),
                }
            }
        })
    };
    let clients: Vec<_> = (0..16).map(client).collect();
    for client in clients {
        client.await.unwrap();
    }
    let max = memory.max.load(Ordering::SeqCst);
    assert!((9..=10).contains(&max), "{max}");
    assert!(memory.loads.load(Ordering::SeqCst) > 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn first_requests_at_once_load_once() {
    let (registry, memory) = registry(10, &[4]);
    let gets: Vec<_> = (0..20)
        .map(|_| {
            let registry = registry.clone();
            tokio::spawn(async move { registry.get(0, LONG).await.is_ok() })
        })
        .collect();
    for get in gets {
        assert!(get.await.unwrap());
    }
    assert_eq!((memory.loads.load(Ordering::SeqCst), registry.loads(0).done), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_load_is_an_error_and_others_go_on() {
    for panics in [false, true] {
        let (registry, memory) = registry(10, &[6, 6]);
        let expected = if panics { "a panic" } else { "no such file" };
        let count = if panics { &memory.panics } else { &memory.failures };
        count.store(1, Ordering::SeqCst);
        let failed = registry.get(0, LONG).await.map(drop);
        assert_eq!(failed, Err(Refused::Failed(expected.to_string())));
        assert!(registry.get(1, LONG).await.is_ok());
        // Repeated requests for a model that cannot be loaded do not unload others.
        assert_eq!(registry.get(0, LONG).await.map(drop), failed);
        assert_eq!((memory.loads.load(Ordering::SeqCst), registry.loads(0).failed), (2, 1));
        // After the failure time, the load is retried.
        let long_ago = Instant::now().checked_sub(FAILURE_TIME).unwrap();
        registry.0.lock().failures[0].as_mut().unwrap().0 = long_ago;
        assert!(registry.get(0, LONG).await.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_use_stays() {
    let (registry, memory) = registry(10, &[6, 6]);
    let lease = registry.get(0, LONG).await.unwrap();
    let late = registry.get(1, Duration::from_millis(30)).await.map(drop);
    assert_eq!((late, lease.bytes), (Err(Refused::Late), 6));
    // The cancelled request has left the queue: model 0 is open.
    assert!(registry.get(0, LONG).await.is_ok());
    let waiting = {
        let registry = registry.clone();
        tokio::spawn(async move { registry.get(1, LONG).await.is_ok() })
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(memory.loads.load(Ordering::SeqCst), 1);
    drop(lease);
    assert!(waiting.await.unwrap());
    assert_eq!(memory.max.load(Ordering::SeqCst), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_model_is_loaded_again() {
    let (registry, memory) = registry(10, &[6]);
    let lease = registry.get(0, LONG).await.unwrap();
    registry.retire(0);
    let waiting = {
        let registry = registry.clone();
        tokio::spawn(async move { registry.get(0, LONG).await.is_ok() })
    };
    drop(lease);
    assert!(waiting.await.unwrap());
    assert_eq!((memory.loads.load(Ordering::SeqCst), memory.max.load(Ordering::SeqCst)), (2, 6));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_loaded_after_the_end() {
    let (registry, memory) = registry(10, &[6, 6]);
    let lease = registry.get(0, LONG).await.unwrap();
    let waiting = {
        let registry = registry.clone();
        tokio::spawn(async move { registry.get(1, LONG).await.map(drop) })
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    registry.close();
    assert_eq!(waiting.await.unwrap(), Err(Refused::Closed));
    drop(lease);
    // The engine rejects requests to a loaded model.
    assert!(registry.get(0, LONG).await.is_ok());
    assert_eq!(registry.get(1, LONG).await.map(drop), Err(Refused::Closed));
    assert_eq!(memory.loads.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_model_is_always_there() {
    let memory = Arc::new(Memory::default());
    let registry = Registry::of_one(Fake { bytes: 3, memory });
    for _ in 0..3 {
        assert_eq!(registry.get(0, Duration::ZERO).await.unwrap().bytes, 3);
    }
}
