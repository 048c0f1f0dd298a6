//! Controls the terminal while an answer is printed.

#[cfg(unix)]
pub use unix::hold_keys;

/// Other systems buffer and echo keys when they are read.
#[cfg(not(unix))]
pub fn hold_keys() -> Option<()> {
    None
}

#[cfg(unix)]
mod unix {
    use std::io::{self, Stdin};

    use nix::sys::termios::{InputFlags, LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

    /// Restores the terminal when it is dropped.
    pub struct HeldKeys(Stdin, Termios);

    /// Buffers keys for the next prompt without echo until the result is dropped. Otherwise the terminal would echo
    /// them in the middle of the answer. Ctrl-C still interrupts. Returns `None` if standard input is not a terminal.
    pub fn hold_keys() -> Option<HeldKeys> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin).ok()?;
        let mut quiet = before.clone();
        // The line editor reads single keys and expects a carriage return for Enter.
        quiet.local_flags.remove(LocalFlags::ECHO | LocalFlags::ECHONL | LocalFlags::ICANON);
        quiet.input_flags.remove(InputFlags::ICRNL);
        tcsetattr(&stdin, SetArg::TCSANOW, &quiet).ok()?;
        Some(HeldKeys(stdin, before))
    }

    impl Drop for HeldKeys {
        fn drop(&mut self) {
            // TCSANOW keeps pending input.
            let _ = tcsetattr(&self.0, SetArg::TCSANOW, &self.1);
        }
    }
}
