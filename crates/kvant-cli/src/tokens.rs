//! Token ids as text, separated by white space.

use std::path::Path;

use crate::result::Result;

/// Parses ids. Error messages name the source with `origin`.
pub fn parse(text: &str, origin: &str) -> Result<Vec<u32>> {
    let id = |(index, word): (usize, &str)| {
        word.parse().map_err(|_| format!("{origin}: token {index} is {word:?}, which is not a token id"))
    };
    let ids = text.split_whitespace().enumerate().map(id).collect::<std::result::Result<Vec<u32>, String>>()?;
    if ids.is_empty() {
        return Err(format!("{origin}: no tokens").into());
    }
    Ok(ids)
}

/// Reads ids from a file.
pub fn read(path: &Path) -> Result<Vec<u32>> {
    parse(&read_text(path)?, &path.display().to_string())
}

/// Reads a text file. Error messages name it.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_or_the_word_that_is_none() {
        assert_eq!(parse(" 2 17\n 4095\t", "--tokens").unwrap(), [2, 17, 4095]);
        let message = |text| parse(text, "--tokens").unwrap_err().to_string();
        assert_eq!(message("2 -1"), "--tokens: token 1 is \"-1\", which is not a token id");
        assert_eq!(message("4294967296"), "--tokens: token 0 is \"4294967296\", which is not a token id");
        assert_eq!(message(" \n"), "--tokens: no tokens");
    }
}
