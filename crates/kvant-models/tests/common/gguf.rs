//! Writes small GGUF files.

/// A metadata value: the id of its type, and its bytes.
pub struct Value(pub u32, pub Vec<u8>);

pub fn text(text: &str) -> Value {
    Value(8, string(text))
}

pub fn u32(value: u32) -> Value {
    Value(4, value.to_le_bytes().to_vec())
}

pub fn u16(value: u16) -> Value {
    Value(2, value.to_le_bytes().to_vec())
}

pub fn f32(value: f32) -> Value {
    Value(6, value.to_le_bytes().to_vec())
}

pub fn flag(value: bool) -> Value {
    Value(7, vec![value.into()])
}

/// Values of one type, at least one.
pub fn array(values: &[Value]) -> Value {
    let mut bytes = values[0].0.to_le_bytes().to_vec();
    bytes.extend((values.len() as u64).to_le_bytes());
    bytes.extend(values.iter().flat_map(|value| value.1.iter()));
    Value(9, bytes)
}

pub fn texts<'a>(values: impl IntoIterator<Item = &'a str>) -> Value {
    array(&values.into_iter().map(text).collect::<Vec<_>>())
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A file under construction.
#[derive(Default)]
pub struct Writer {
    pub pairs: Vec<(String, Value)>,
    /// Name, dimensions (innermost first), id of the type, bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl Writer {
    pub fn pair(mut self, key: &str, value: Value) -> Writer {
        self.pairs.push((key.to_string(), value));
        self
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: Vec<u8>) -> Writer {
        self.tensors.push((name.to_string(), dims.to_vec(), kind, bytes));
        self
    }

    /// A file of version 3 with an alignment of 32.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, Value(kind, bytes)) in &self.pairs {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        let mut offset = 0;
        for (name, dims, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(32);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }
}
