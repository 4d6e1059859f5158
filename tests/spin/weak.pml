/* The memory model that the models of this folder share, and the words they write it with.
 *
 * One memory, changed by one store at a time: a store that anybody else sees, everybody sees. Each
 * thread has a handful of operations (loads, stores, read-modify-writes), numbered in the order in
 * which they stand in the C source. It performs them one at a time in ANY order, only that
 *
 *   - operations on the same location stay in their order (where a model lets a thread load what it
 *     has stored itself, it takes its own value, performed or not, as a store buffer forwards it);
 *   - an operation waits for the loads that say where or what (address and data dependency);
 *   - a store waits for the loads that decide whether it is reached (control dependency); a load
 *     does not: it may be performed early, as on a mispredicted branch, and counts if it is reached;
 *   - acquire: what stands behind an acquire load waits for it;
 *   - release: a release store waits for everything before it;
 *   - an acquire fence holds everything behind it until the loads before it are performed, a release
 *     fence holds the stores behind it until everything before it is, a seq_cst fence both;
 *   - a seq_cst load waits for seq_cst stores and read-modify-writes before it.
 *
 * A read-modify-write whose order matters is two operations, the load and the store, between which
 * others may perform anything but a store to that location: acquire binds to the first, release to
 * the second, as of LDAXR and STLXR.
 *
 * Why this is at least as weak as the machines: aarch64 is multi-copy atomic for others ("other
 * multi-copy atomic", Arm ARM B2.3), so one memory suffices, and its ordered-before relation
 * contains every edge named above (Pulte et al., POPL 2018); LDAR, STLR and DMB have some more, such
 * as the loads that a release fence (DMB ISH) holds up and the model does not. x86-64 (TSO) keeps
 * all loads in order and all stores in order, and each read-modify-write is a full fence there: it
 * has fewer behaviours still. A compiler may reorder relaxed accesses as well as the processor, with
 * the same limits, as long as it leaves dependencies through loaded values alone, which gcc and
 * clang do with atomics. Machines that show a store to some before others (POWER) are not covered.
 *
 * Each order that the code relies on is a macro given with -D, read from the marker that stands in
 * the C source (test_models.py): 0 relaxed, 1 acquire, 2 release, 3 acq_rel, 7 seq_cst.
 */
#define BIND_LATER(order, ops) (((order) & 1) * (ops))       /* acquire: `ops` come first */
#define BIND_EARLIER(order, ops) (((order) >> 1 & 1) * (ops)) /* release: `ops` come first */
#define BIND_ALL(order, ops) (((order) >> 2) * (ops))        /* seq_cst fence */

/* Operations are powers of two in program order, so all that stand before one are its bits below.
 * `done` is an int: of `unsigned done : 16` spin 6.5.2 does not tell all states apart. */
#define BEFORE(op) ((op) - 1)

/* Perform `op` once, after the operations in `first`: the head of a guarded statement. */
#define PERFORM(op, first) (done & (op)) == 0 && (done & (first)) == (first) -> done = done | (op)
#define DONE(ops) ((done & (ops)) == (ops))
