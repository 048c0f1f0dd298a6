//! Models that are loaded on demand. A separate thread loads and unloads them one at a time, so that disconnecting
//! clients do not interrupt it.

use std::{
    collections::HashMap,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc},
    thread,
    time::{Duration, Instant},
};

use tokio::{sync::oneshot, time};

use super::plan::{Effect, Plan};

/// Maximum requests that wait for one model.
const MAX_WAITING: usize = 256;
/// How long requests get the error of a failed load before the load is retried.
const FAILURE_TIME: Duration = Duration::from_secs(10);

/// A loaded model.
pub(crate) trait Resident: Send + Sync + 'static {
    /// Frees the memory of the model before it returns.
    fn end(self);
}

/// Loads a model, or returns the reason why it cannot.
pub(super) type Loader<M> = Box<dyn Fn() -> Result<M, String> + Send + Sync>;

/// The reason why a request does not get its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The model cannot be loaded.
    Failed(String),
    /// The time limit is over.
    Late,
    /// The maximum number of requests already wait for the model.
    Full,
    /// The server is shutting down.
    Closed,
}

/// Load counts of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Loads {
    pub done: u64,
    pub failed: u64,
}

/// Models, loaded or not. Clones are handles of one registry.
pub(super) struct Registry<M: Resident>(Arc<Shared<M>>);

struct Shared<M: Resident> {
    state: Mutex<State<M>>,
    /// The work queue of the thread. `None` if nothing is ever loaded.
    work: Option<mpsc::Sender<Effect>>,
}

struct State<M: Resident> {
    plan: Plan,
    models: Vec<Option<Arc<M>>>,
    /// The loader of each model. Empty if the only model is always loaded.
    loaders: Vec<Arc<Loader<M>>>,
    waiting: HashMap<u64, oneshot::Sender<Result<Lease<M>, Refused>>>,
    failures: Vec<Option<(Instant, String)>>,
    loads: Vec<Loads>,
    is_closed: bool,
}

/// Keeps a model loaded while it exists.
pub(crate) struct Lease<M: Resident> {
    // Dropped before the release, so that a model without users has no other handle.
    model: Arc<M>,
    _release: Release<M>,
}

/// Releases a model when it is dropped.
struct Release<M: Resident> {
    index: usize,
    registry: Arc<Shared<M>>,
}

/// A place in the queue. Dropping it cancels the request.
struct Waiting<M: Resident> {
    index: usize,
    ticket: u64,
    answer: Option<oneshot::Receiver<Result<Lease<M>, Refused>>>,
    registry: Arc<Shared<M>>,
}

impl<M> Clone for Registry<M>
where
    M: Resident,
{
    fn clone(&self) -> Self {
        Registry(Arc::clone(&self.0))
    }
}

impl<M: Resident> Registry<M> {
    /// A registry of one model, which is always loaded.
    pub fn of_one(model: M) -> Registry<M> {
        let mut plan = Plan::new(usize::MAX, [0]);
        // This user never releases the model.
        let _ = (plan.ask(0), plan.loaded(0));
        let registry = Registry(Arc::new(Shared::new(plan, None)));
        registry.0.lock().push(Some(Arc::new(model)));
        registry
    }

    /// Creates a registry of models that take at most `limit` bytes together. Each is given by its size in bytes and
    /// its loader. None is loaded yet.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(limit: usize, models: Vec<(usize, Loader<M>)>) -> std::io::Result<Registry<M>> {
        let (work, orders) = mpsc::channel();
        let inner = Arc::new(Shared::new(Plan::new(limit, []), Some(work)));
        let weak = Arc::downgrade(&inner);
        thread::Builder::new().name("kvant-models".to_string()).spawn(move || keep(&weak, &orders))?;
        let registry = Registry(inner);
        models.into_iter().for_each(|(bytes, loader)| registry.add(bytes, loader));
        Ok(registry)
    }

    /// One more model, with the next index.
    pub fn add(&self, bytes: usize, loader: Loader<M>) {
        let mut state = self.0.lock();
        state.plan.add(bytes);
        state.loaders.push(Arc::new(loader));
        state.push(None);
    }

    /// Waits for a model until `limit` has passed. Loads it if necessary.
    pub async fn get(&self, index: usize, limit: Duration) -> Result<Lease<M>, Refused> {
        let mut waiting = self.ask(index)?;
        let answer = waiting.answer.take().ok_or(Refused::Closed)?;
        match time::timeout(limit, answer).await {
            Ok(answer) => answer.unwrap_or(Err(Refused::Closed)),
            Err(_) => Err(Refused::Late),
        }
    }

    /// Like [`Registry::get`], but blocking and without a limit.
    pub fn get_blocking(&self, index: usize) -> Result<Lease<M>, Refused> {
        let mut waiting = self.ask(index)?;
        let answer = waiting.answer.take().ok_or(Refused::Closed)?;
        answer.blocking_recv().unwrap_or(Err(Refused::Closed))
    }

    fn ask(&self, index: usize) -> Result<Waiting<M>, Refused> {
        let mut state = self.0.lock();
        if state.is_closed && !state.plan.is_open(index) {
            return Err(Refused::Closed);
        }
        if state.plan.waiting(index) >= MAX_WAITING {
            return Err(Refused::Full);
        }
        let failure = state.failures[index].as_ref().filter(|(when, _)| when.elapsed() < FAILURE_TIME);
        if let Some((_, reason)) = failure {
            return Err(Refused::Failed(reason.clone()));
        }
        let (sender, answer) = oneshot::channel();
        let (ticket, effects) = state.plan.ask(index);
        state.waiting.insert(ticket, sender);
        self.0.run(state, effects);
        Ok(Waiting { index, ticket, answer: Some(answer), registry: Arc::clone(&self.0) })
    }

    /// Calls a function with each model, or `None` if it is not loaded. The function runs under the lock, so it must be
    /// fast.
    pub fn each(&self, mut see: impl FnMut(usize, Option<&M>)) {
        let state = self.0.lock();
        state.models.iter().enumerate().for_each(|(index, model)| see(index, model.as_deref()));
    }

    /// The load counts of a model.
    pub fn loads(&self, index: usize) -> Loads {
        self.0.lock().loads[index]
    }

    /// Total of the given sizes of the loaded models.
    pub fn bytes(&self) -> usize {
        self.0.lock().plan.bytes()
    }

    /// Marks a model as failed. It is loaded again on demand, after the requests that use it have ended.
    pub fn retire(&self, index: usize) {
        let mut state = self.0.lock();
        let effects = state.plan.retire(index);
        self.0.run(state, effects);
    }

    /// Stops all loading and unloading.
    pub fn close(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        let tickets = state.plan.clear();
        let waiting: Vec<_> = tickets.iter().filter_map(|ticket| state.waiting.remove(ticket)).collect();
        drop(state);
        for sender in waiting {
            let _ = sender.send(Err(Refused::Closed));
        }
    }
}

impl<M: Resident> State<M> {
    fn push(&mut self, model: Option<Arc<M>>) {
        self.models.push(model);
        self.failures.push(None);
        self.loads.push(Loads::default());
    }
}

impl<M: Resident> Shared<M> {
    fn new(plan: Plan, work: Option<mpsc::Sender<Effect>>) -> Shared<M> {
        let state = State {
            plan,
            models: Vec::new(),
            loaders: Vec::new(),
            waiting: HashMap::new(),
            failures: Vec::new(),
            loads: Vec::new(),
            is_closed: false,
        };
        Shared { state: Mutex::new(state), work }
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes the decisions of the plan.
    fn run(self: &Arc<Self>, mut state: MutexGuard<'_, State<M>>, effects: Vec<Effect>) {
        let mut granted = Vec::new();
        for effect in effects {
            match effect {
                Effect::Grant { model: index, ticket } => {
                    let sender = state.waiting.remove(&ticket);
                    let _release = Release { index, registry: Arc::clone(self) };
                    // The plan grants only loaded models.
                    let lease = state.models[index].clone().map(|model| Lease { model, _release });
                    granted.push(sender.zip(lease));
                }
                work => {
                    // The thread lives as long as the registry.
                    let _ = self.work.as_ref().map(|thread| thread.send(work));
                }
            }
        }
        // Dropping the leases of disconnected clients takes the lock.
        drop(state);
        for (sender, lease) in granted.into_iter().flatten() {
            let _ = sender.send(Ok(lease));
        }
    }

    fn load(self: &Arc<Self>, index: usize) {
        let loader = Arc::clone(&self.lock().loaders[index]);
        let loaded = catch_unwind(AssertUnwindSafe(|| loader())).unwrap_or_else(|_| Err("a panic".to_string()));
        let mut state = self.lock();
        match loaded {
            Ok(model) => {
                state.models[index] = Some(Arc::new(model));
                state.failures[index] = None;
                state.loads[index].done += 1;
                let effects = state.plan.loaded(index);
                self.run(state, effects);
            }
            Err(reason) => {
                state.failures[index] = Some((Instant::now(), reason.clone()));
                state.loads[index].failed += 1;
                let (tickets, effects) = state.plan.failed(index);
                let waiting: Vec<_> = tickets.iter().filter_map(|ticket| state.waiting.remove(ticket)).collect();
                self.run(state, effects);
                for sender in waiting {
                    let _ = sender.send(Err(Refused::Failed(reason.clone())));
                }
            }
        }
    }

    fn unload(self: &Arc<Self>, index: usize) {
        let model = self.lock().models[index].take();
        // There is no other handle: the model had no users.
        if let Some(model) = model.and_then(Arc::into_inner) {
            // A panic would end this thread, and with it all loading.
            let _ = catch_unwind(AssertUnwindSafe(|| model.end()));
        }
        let mut state = self.lock();
        let effects = state.plan.unloaded(index);
        self.run(state, effects);
    }
}

/// Loads and unloads models until the registry is dropped.
fn keep<M: Resident>(registry: &Weak<Shared<M>>, orders: &mpsc::Receiver<Effect>) {
    while let Ok(order) = orders.recv() {
        let Some(registry) = registry.upgrade() else { return };
        match order {
            Effect::Load(index) => registry.load(index),
            Effect::Unload(index) => registry.unload(index),
            Effect::Grant { .. } => {}
        }
    }
}

impl<M: Resident> Drop for Waiting<M> {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            let effects = state.plan.cancel(self.index, self.ticket);
            self.registry.run(state, effects);
        }
    }
}

impl<M: Resident> Deref for Lease<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.model
    }
}

impl<M: Resident> Drop for Release<M> {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        let effects = state.plan.release(self.index);
        self.registry.run(state, effects);
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;
