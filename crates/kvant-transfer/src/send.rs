//! The sender's side of a transfer.

use std::{
    cell::Cell,
    io::{BufWriter, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use crate::{
    Refusal, TransferError,
    offers::{Offer, Offers},
    timed::Timed,
    transfers::hash,
    wire::{Greeting, PageWriter, write_answer},
};

/// Bytes of pages that are in memory at a time, per connection.
pub const CHUNK: usize = 8 << 20;
/// Maximum time to receive a greeting.
const GREETING_TIME: Duration = Duration::from_secs(10);
/// Maximum time to wait for an offer with a token of the client, who may call both workers at once.
const OFFER_WAIT: Duration = Duration::from_secs(1);
/// Interval of the search for new pages. The engine answers between two steps.
const POLL: Duration = Duration::from_millis(3);
/// Interval of messages while no page is ready.
const WAITING: Duration = Duration::from_secs(1);

/// Sends the pages that a receiver has a token for. Returns their number.
pub fn send(offers: &Offers, stream: &TcpStream, time: Duration) -> Result<usize, TransferError> {
    stream.set_nodelay(true)?;
    let until = Cell::new(Instant::now() + GREETING_TIME);
    let greeting = Greeting::read(&mut Timed { stream, until: &until })?;
    let offer = match offers.take(&greeting.token, OFFER_WAIT) {
        None => Err(Refusal::Token),
        Some(offer) if offer.engine.page_identity() != greeting.format => Err(Refusal::Format),
        Some(offer) if hash(&offer.tokens) != greeting.prompt => Err(Refusal::Prompt),
        Some(offer) => Ok(offer),
    };
    until.set(Instant::now() + time);
    let mut to = BufWriter::with_capacity(1 << 16, Timed { stream, until: &until });
    write_answer(&mut to, offer.as_ref().err().copied())?;
    match offer {
        Ok(offer) => {
            let first = greeting.first.iter().map(|&page| page as usize).collect();
            send_pages(&offer, first, PageWriter::new(to, greeting.token), &until, time)
        }
        Err(refusal) => {
            to.flush()?;
            Err(TransferError::Refused(refusal))
        }
    }
}

/// Sends the pages of a prompt while it is computed. `next`: the first page to send, by layer group.
fn send_pages(
    offer: &Offer,
    mut next: Vec<usize>,
    mut writer: PageWriter<BufWriter<Timed<'_>>>,
    until: &Cell<Instant>,
    time: Duration,
) -> Result<usize, TransferError> {
    let (mut sent, mut latest) = (0, Instant::now());
    next.resize(offer.engine.page_bytes().len(), 0);
    loop {
        // Before the pages are copied: those of the last step are among them.
        let is_over = offer.progress.wait(Duration::ZERO);
        let pages = offer.engine.export_pages(&offer.scope, &offer.tokens, &next, !is_over, CHUNK);
        for page in &pages {
            writer.write(page)?;
            next[page.group] = page.index + 1;
        }
        sent += pages.len();
        if is_over && pages.is_empty() {
            writer.end()?;
            return Ok(sent);
        }
        if is_over {
            continue;
        }
        if !pages.is_empty() || latest.elapsed() >= WAITING {
            writer.wait()?;
            latest = Instant::now();
        }
        offer.progress.wait(POLL);
        until.set(Instant::now() + time);
    }
}
