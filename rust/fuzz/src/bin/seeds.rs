//! Writes the seed corpus into `fuzz/corpus`, anew: `cargo run -p offbeat-fuzz --bin seeds`. What a fuzzer has found lies
//! beside it, under names that begin with `found-`, and stays.

use std::fs;
use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    for (target, _) in offbeat_fuzz::TARGETS {
        let folder = corpus.join(target);
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().starts_with("found-") {
                fs::remove_file(entry.path())?;
            }
        }
    }
    for seed in offbeat_fuzz::seeds() {
        fs::write(corpus.join(seed.target).join(seed.name), seed.bytes)?;
    }
    Ok(())
}
