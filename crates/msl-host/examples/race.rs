//! Finds a missing barrier: `cargo run -p msl-host --example race`.

use msl_host::{Buffer, Build, Error, Grid, Host, Launch, Schedule, Source};

const REVERSED: &str = "#include <metal_stdlib>
using namespace metal;
kernel void reversed(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                     uint t [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[t] = x[t];
  // Missing: threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = shared[63 - t];
}
";

fn main() -> Result<(), Error> {
    let library = Host::new()?.compile(&Source::new("reversed.metal", REVERSED), Build::Checker)?;
    let x: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut y = vec![0; 256];
    let grid = Grid::Threadgroups { groups: [1, 1, 1], threads: [64, 1, 1] };
    let launch = Launch::new("reversed", grid).buffer(0, Buffer::read(&x)).buffer(1, Buffer::write(&mut y));
    match library.run(&launch, Schedule::Forward) {
        Err(Error::Findings(findings)) => println!("{findings}"),
        Ok(_) => println!("nothing found"),
        Err(other) => return Err(other),
    }
    Ok(())
}
