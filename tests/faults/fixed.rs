//! Arrays in fixed memory between canaries, as an engine's buffers lie among others.

use std::sync::{Arc, Mutex};

use specrs::geometry::Geometry;
use specrs::plan::{Arrays, Extent, Format, Given, Load, Memory, Phase};

const CANARY: u64 = 0xCA7A_12BE_EFCA_7A12;
/// Words before and behind each array.
const MARGIN: usize = 64;

/// The middle of a larger tensor; whole when it is dropped.
#[derive(Debug)]
struct Middle {
    name: &'static str,
    words: Vec<u64>,
    bytes: usize,
    broken: Arc<Mutex<Vec<&'static str>>>,
}

impl Memory for Middle {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words[MARGIN..])[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words[MARGIN..])[..self.bytes]
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        let (before, rest) = self.words.split_at(MARGIN);
        let behind = &rest[self.bytes.div_ceil(8)..];
        if before.iter().chain(behind).any(|&w| w != CANARY) {
            self.broken.lock().unwrap().push(self.name);
        }
    }
}

/// The arrays of a phase at exactly the capacity that `geometry` states for `requests`, canaries around each.
pub(crate) struct Fixed {
    pub(crate) arrays: Arrays,
    broken: Arc<Mutex<Vec<&'static str>>>,
}

impl Fixed {
    pub(crate) fn new(format: &dyn Format, geometry: &Geometry, phase: Phase, requests: u32) -> Self {
        let broken = Arc::new(Mutex::new(Vec::new()));
        let mut given: Vec<Option<Given>> = format.arrays().iter().map(|_| None).collect();
        let load = Load::limit(geometry, phase, requests).unwrap();
        for (at, extent) in format.extents(geometry, &load).unwrap() {
            let spec = &format.arrays()[at];
            let bytes = extent.elements() as usize * spec.dtype.size();
            let words = vec![CANARY; 2 * MARGIN + bytes.div_ceil(8)];
            let memory = Middle { name: spec.name, words, bytes, broken: broken.clone() };
            given[at] = Some(Given { memory: Box::new(memory), extent });
        }
        Self { arrays: Arrays::fixed(format.arrays(), given).unwrap(), broken }
    }

    /// All that the arrays hold, the parts behind what is used included.
    pub(crate) fn contents(&self) -> Vec<Vec<u8>> {
        self.arrays.iter().map(|a| a.bytes.to_vec()).collect()
    }

    /// End their use: nothing around them was written.
    pub(crate) fn finish(self) {
        let Self { arrays, broken } = self;
        drop(arrays);
        assert_eq!(*broken.lock().unwrap(), [""; 0], "memory around these arrays was written");
    }
}

/// Elements that an array of `format` holds at most.
pub(crate) fn capacity(format: &dyn Format, geometry: &Geometry, phase: Phase, requests: u32, name: &str) -> Extent {
    let load = Load::limit(geometry, phase, requests).unwrap();
    let all = format.extents(geometry, &load).unwrap();
    all.into_iter().find(|&(at, _)| format.arrays()[at].name == name).unwrap().1
}

#[test]
#[should_panic(expected = "memory around these arrays was written")]
fn canaries_see_a_write_beside_the_array() {
    let broken = Arc::new(Mutex::new(Vec::new()));
    let mut m = Middle { name: "a", words: vec![CANARY; 2 * MARGIN + 2], bytes: 12, broken: broken.clone() };
    m.bytes_mut().fill(1);
    m.words[MARGIN + 2] = 7;
    drop(m);
    Fixed { arrays: Arrays::default(), broken }.finish();
}
