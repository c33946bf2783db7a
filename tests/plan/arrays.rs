//! Memory in which a format's arrays are written: memory of specrs that grows, and memory of a caller that never does.

use specrs::error::Error;
use specrs::plan::{Arrays, DType, Extent, Given, HostMemory, Memory, Need, Spec};

const SPECS: &[Spec] = &[
    Spec::new("indptr", DType::I32),
    Spec::new("indices", DType::I64),
    Spec::new("table", DType::I32),
    Spec::optional("mask", DType::Bool),
];

fn need(array: usize, used: Extent, limit: Extent) -> Option<Need> {
    Some(Need { array, used, limit })
}

fn given(bytes: u64, extent: Extent) -> Option<Given> {
    Some(Given { memory: Box::new(HostMemory::new("test", bytes).unwrap()), extent })
}

fn hint() -> String {
    "max_batch 2".into()
}

const LINE: fn(u64) -> Extent = Extent::Line;
fn table(rows: u64, cols: u64) -> Extent {
    Extent::Table { rows, cols }
}

/// A capacity error names need, have and the configuration, and comes before anything is written or counted.
#[test]
fn nothing_is_changed_when_one_array_is_too_small() {
    let all = vec![given(16, LINE(4)), given(16, LINE(2)), given(24, table(2, 3)), None];
    let mut arrays = Arrays::fixed(SPECS, all).unwrap();
    let [indptr] = arrays.open([need(0, LINE(4), LINE(4))], hint).unwrap();
    indptr.slice::<i32>().unwrap().copy_from_slice(&[1, 2, 3, 4]);
    arrays.set_poison(true);
    let err = arrays.open([need(0, LINE(3), LINE(9)), need(1, LINE(3), LINE(9))], hint).unwrap_err();
    let want = Error::Capacity { what: "indices", need: 3, have: 2, hint: "max_batch 2".into() };
    assert_eq!(err, want);
    assert_eq!((arrays.line::<i32>("indptr"), arrays.generation()), (&[1, 2, 3, 4][..], 1));
    for (used, what) in [(table(3, 1), "rows of max_batch 2"), (table(1, 4), "columns of max_batch 2")] {
        match arrays.open([need(2, used, used)], hint).unwrap_err() {
            Error::Capacity { what: "table", hint, .. } => assert_eq!(hint, what),
            other => panic!("{other}"),
        }
    }
}

/// Own memory grows, but not beyond what the geometry states.
#[test]
fn own_memory_ends_at_the_stated_capacity() {
    let mut arrays = Arrays::own(SPECS);
    let [v] = arrays.open([need(1, LINE(5), LINE(5))], hint).unwrap();
    v.slice::<i64>().unwrap().copy_from_slice(&[5, 4, 3, 2, 1]);
    assert_eq!(arrays.line::<i64>("indices"), [5, 4, 3, 2, 1]);
    assert!(matches!(
        arrays.open([need(1, LINE(6), LINE(5))], hint),
        Err(Error::Capacity { what: "indices", need: 6, have: 5, .. })
    ));
    // A smaller size shows exactly what is used of it, at the same place.
    let at = arrays.get("indices").unwrap().bytes.as_ptr();
    let [v] = arrays.open([need(1, LINE(2), LINE(5))], hint).unwrap();
    v.slice::<i64>().unwrap().copy_from_slice(&[7, 8]);
    assert_eq!(arrays.line::<i64>("indices"), [7, 8]);
    assert_eq!(arrays.get("indices").unwrap().bytes.as_ptr(), at);
}

/// Arrays of an earlier phase are not there in the next one.
#[test]
fn a_phase_sees_its_own_arrays_alone() {
    let mut arrays = Arrays::own(SPECS);
    arrays.open([need(0, LINE(2), LINE(2)), need(1, LINE(2), LINE(2))], hint).unwrap();
    let [t, none] = arrays.open([need(2, table(2, 2), table(2, 2)), None], hint).unwrap();
    assert!(!none.is_present());
    t.slice::<i32>().unwrap().copy_from_slice(&[1, 2, 3, 4]);
    let names: Vec<_> = arrays.iter().map(|a| a.spec.name).collect();
    assert_eq!(names, ["table"]);
    assert_eq!((arrays.row::<i32>("table", 1), arrays.row::<i32>("table", 2)), (&[3, 4][..], &[][..]));
    assert!(arrays.line::<i32>("indptr").is_empty());
}

/// A table in wider memory keeps the memory's rows, and remembers in `marks` what a row holds.
#[test]
fn a_table_in_wider_memory() {
    let mut arrays = Arrays::fixed(SPECS, vec![given(8, LINE(2)), given(8, LINE(1)), given(60, table(3, 5))]).unwrap();
    let [mut t] = arrays.open([need(2, table(2, 2), table(9, 9))], hint).unwrap();
    assert_eq!((t.width, t.marks.to_vec()), (5, vec![0; 3]));
    t.marks[1] = 2;
    t.marks = &mut [];
    t.slice::<i32>().unwrap()[5..7].copy_from_slice(&[8, 9]);
    assert_eq!((arrays.row::<i32>("table", 0), arrays.row::<i32>("table", 1)), (&[0, 0][..], &[8, 9][..]));
    arrays.set_poison(true);
    let [t] = arrays.open([need(2, table(1, 1), table(9, 9))], hint).unwrap();
    assert_eq!(t.marks.to_vec(), vec![5; 3], "poison is not the dead value");
    let cells = t.slice::<i32>().unwrap();
    assert!(cells.len() == 15 && cells.iter().all(|&c| c != 0));
}

#[test]
fn missing_and_wrong_arrays_are_refused_by_name() {
    let mut arrays = Arrays::fixed(SPECS, vec![given(8, LINE(2))]).unwrap();
    let [mask] = arrays.open([need(3, LINE(9), LINE(9))], hint).unwrap();
    assert!(!mask.is_present() && mask.slice::<u8>().unwrap().is_empty(), "an optional array may be left out");
    let err = arrays.open([need(1, LINE(9), LINE(9))], hint).unwrap_err().to_string();
    assert_eq!(err, "indices: got none, want an array of 9 elements; max_batch 2");
    let mut own = Arrays::own(SPECS);
    let [v] = own.open([need(0, LINE(1), LINE(1))], hint).unwrap();
    assert!(matches!(v.slice::<i64>(), Err(Error::Mismatch { operand: "indptr", .. })));
    // A caller's bytes would be taken for anything: eight of them are two int32 as well as one int64.
    let mut theirs = Arrays::fixed(SPECS, vec![None, given(16, LINE(2))]).unwrap();
    let [v] = theirs.open([need(1, LINE(2), LINE(2))], hint).unwrap();
    let err = v.slice::<i32>().unwrap_err().to_string();
    assert_eq!(err, "indices: got an array of int64, want 2 elements of i32");
    let short = Arrays::fixed(SPECS, vec![given(7, LINE(2))]).unwrap_err().to_string();
    assert_eq!(short, "indptr: got 7 bytes, want 8 bytes: [2] of int32");
}

/// Checks that all of a caller's memory holds the dead value afterwards, whatever it held before.
#[test]
fn what_memory_held_before_is_cleared() {
    let mut memory = HostMemory::new("test", 24).unwrap();
    memory.bytes_mut().fill(7);
    let given = Given { memory: Box::new(memory), extent: table(2, 3) };
    let mut arrays = Arrays::fixed(SPECS, vec![None, None, Some(given)]).unwrap();
    let [t] = arrays.open([need(2, table(1, 1), table(2, 3))], hint).unwrap();
    assert_eq!((t.marks.to_vec(), t.slice::<i32>().unwrap().to_vec()), (vec![0; 2], vec![0; 6]));
}

/// A table without columns has as many rows as a caller likes; nothing is kept of each.
#[test]
fn rows_of_nothing() {
    let mut arrays = Arrays::fixed(SPECS, vec![None, None, given(0, table(u64::MAX, 0))]).unwrap();
    let [t] = arrays.open([need(2, table(9, 0), table(9, 0))], hint).unwrap();
    assert!(t.marks.is_empty() && t.slice::<i32>().unwrap().is_empty());
}

/// Memory of a caller at an odd address cannot be seen as int32.
#[test]
fn unaligned_memory_is_refused() {
    #[derive(Debug)]
    struct Odd(Vec<u64>);
    impl Memory for Odd {
        fn bytes(&self) -> &[u8] {
            &bytemuck::cast_slice(&self.0)[1..9]
        }
        fn bytes_mut(&mut self) -> &mut [u8] {
            &mut bytemuck::cast_slice_mut(&mut self.0)[1..9]
        }
    }
    let odd = Given { memory: Box::new(Odd(vec![0; 2])), extent: LINE(2) };
    let mut arrays = Arrays::fixed(SPECS, vec![Some(odd)]).unwrap();
    let [v] = arrays.open([need(0, LINE(2), LINE(2))], hint).unwrap();
    assert!(matches!(v.slice::<i32>(), Err(Error::Mismatch { operand: "indptr", .. })));
}
