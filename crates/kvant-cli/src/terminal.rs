//! The terminal while an answer is written.

#[cfg(unix)]
pub use unix::hold_keys;

/// Other systems keep keys by themselves and show them where they are read.
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

    /// Keeps keys for the next prompt and shows none of them until the result is dropped. Without it, the terminal
    /// shows keys in the middle of the answer. Ctrl-C still interrupts. `None` if standard input is no terminal.
    pub fn hold_keys() -> Option<HeldKeys> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin).ok()?;
        let mut quiet = before.clone();
        // The line editor reads single keys: Enter is a carriage return for it.
        quiet.local_flags.remove(LocalFlags::ECHO | LocalFlags::ECHONL | LocalFlags::ICANON);
        quiet.input_flags.remove(InputFlags::ICRNL);
        tcsetattr(&stdin, SetArg::TCSANOW, &quiet).ok()?;
        Some(HeldKeys(stdin, before))
    }

    impl Drop for HeldKeys {
        fn drop(&mut self) {
            // TCSANOW keeps what was typed.
            let _ = tcsetattr(&self.0, SetArg::TCSANOW, &self.1);
        }
    }
}
