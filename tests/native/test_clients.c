/* The client table: byte locks, slots, epochs, and what /proc tells of a thread. */
#include "world.h"

#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

static segment s;

static void set_up(void) { s = segment_make(LCS_PAYLOAD_OFFSET + 4096); }
static void tear_down(void) { segment_end(&s); }

static void byte_locks_belong_to_descriptions(void) {
    set_up();
    int a = life_descriptor(&s), b = life_descriptor(&s), byte = 5;
    CHECK_EQ(lcs_byte_lock(a, byte, 1), LC_OK);
    CHECK_EQ(lcs_byte_lock(a, byte, 1), LC_OK); /* once more is no more */
    CHECK_EQ(lcs_byte_held(a, byte, 1), 0);     /* its own is not shown to it */
    CHECK_EQ(lcs_byte_held(b, byte, 1), 1);
    CHECK_EQ(lcs_byte_held(b, byte + 1, 1), 0);
    CHECK_EQ(lcs_byte_held(b, byte - 2, 3), 1);
    CHECK_EQ(lcs_byte_lock(b, byte, 1), LC_E_BUSY);
    CHECK_EQ(lcs_byte_lock(b, byte, 0), LC_E_BUSY);
    CHECK_EQ(lcs_byte_lock(a, byte, 0), LC_OK); /* now shared */
    CHECK_EQ(lcs_byte_lock(b, byte, 0), LC_OK);
    CHECK_EQ(lcs_byte_lock(b, byte, 1), LC_E_BUSY);
    CHECK_EQ(lcs_byte_unlock(a, byte), LC_OK);
    CHECK_EQ(lcs_byte_lock(b, byte, 1), LC_OK);
    close(b);
    CHECK_EQ(lcs_byte_held(a, byte, 1), 0);
    close(a);
    CHECK_EQ(lcs_byte_lock(-1, 0, 1), LC_E_SYS - EBADF);
    CHECK_EQ(lcs_byte_held(-1, 0, 1), LC_E_SYS - EBADF);
    tear_down();
}

static void slot_says_who_took_it(void) {
    set_up();
    client c = client_join_as(&s, LCS_FLAG_DEVICE);
    const lcs_client *record = lcs_client_of(c.at, c.slot);
    CHECK_EQ(c.slot, 1);
    CHECK_EQ(lc_load(&record->state), LCS_CLIENT_TAKEN);
    CHECK_EQ(lc_load(&record->epoch), lcs_attachment_epoch(c.at));
    CHECK_EQ(record->pid, getpid());
    CHECK_EQ(record->flags, LCS_FLAG_DEVICE);
    CHECK_EQ(record->start_ticks, lcs_start_ticks((uint32_t)getpid()));
    CHECK(record->start_ticks != 0 && record->attached_ns != 0);
    CHECK(strcmp((const char *)record->role, "a test") == 0);
    CHECK_EQ(lcs_attachment_slot(c.at), 1);
    CHECK_EQ(lcs_slot_claim(c.at, "", 0), LC_E_TWICE);
    CHECK_EQ(lcs_slot_alive(c.at, 1), 1);
    uint32_t epoch = c.at->epoch;
    CHECK_EQ(lcs_slot_release(c.at), LC_OK);
    CHECK_EQ(lc_load(&record->state), LCS_CLIENT_FREE);
    CHECK(lc_load(&record->epoch) != epoch);
    CHECK_EQ(lcs_slot_release(c.at), LC_E_MISSING);
    client next = client_join(&s); /* the byte was given back too */
    CHECK_EQ(next.slot, 1);
    CHECK(next.at->epoch != epoch);
    client_leave(&next);
    client_forget(&c);
    tear_down();
}

static void slot_of_a_long_role(void) {
    char role[100];
    set_up();
    memset(role, 'x', sizeof role - 1);
    role[sizeof role - 1] = 0;
    client c = client_join(&s);
    CHECK_EQ(lcs_slot_release(c.at), LC_OK);
    CHECK_EQ(lcs_slot_claim(c.at, role, 0), 1);
    const lcs_client *record = lcs_client_of(c.at, 1);
    CHECK_EQ(((const char *)record->role)[30], 'x');
    CHECK_EQ(((const char *)record->role)[31], 0);
    CHECK_EQ(record->lookups, 0);
    client_leave(&c);
    tear_down();
}

static void slots_are_63(void) {
    client c[LCS_SLOTS];
    set_up();
    for (uint32_t i = 1; i < LCS_SLOTS; i++) {
        c[i] = client_join(&s);
        CHECK_EQ(c[i].slot, i);
    }
    c[0] = reader_join(&s);
    CHECK_EQ(lcs_slot_claim(c[0].at, "", 0), LC_E_READONLY);
    lcs_attachment *at = lcs_attachment_new(s.base, s.bytes, c[0].life, 0, 0, 0);
    CHECK_EQ(lcs_slot_claim(at, "", 0), LC_E_FULL);
    client_die(&c[7]);
    CHECK_EQ(lcs_slot_claim(at, "", 0), LC_E_FULL); /* dead, and not yet mended */
    CHECK_EQ(lcs_slot_free_dead(at, 7), LC_OK);
    CHECK_EQ(lcs_slot_claim(at, "", 0), 7);
    CHECK_EQ(lcs_slot_release(at), LC_OK);
    lcs_attachment_free(at);
    client_forget(&c[0]);
    for (uint32_t i = 1; i < LCS_SLOTS; i++)
        if (i != 7) client_leave(&c[i]);
    tear_down();
}

/* A byte that somebody holds, or a state that changes behind it, is passed over. */
static void slot_whose_byte_is_held_is_passed_over(void) {
    set_up();
    int mender = life_descriptor(&s);
    CHECK_EQ(lcs_byte_lock(mender, LCS_BYTE_SLOTS + 1, 1), LC_OK);
    client c = client_join(&s);
    CHECK_EQ(c.slot, 2);
    close(mender);
    client_leave(&c);
    c = client_join(&s);
    CHECK_EQ(c.slot, 1);
    client_leave(&c);
    tear_down();
}

static void slot_of_the_dead(void) {
    set_up();
    client a = client_join(&s), b = client_join(&s);
    CHECK_EQ(lcs_slot_alive(b.at, a.slot), 1);
    CHECK_EQ(lcs_slot_free_dead(b.at, a.slot), LC_E_BUSY);
    CHECK_EQ(lcs_slot_free_dead(b.at, b.slot), LC_E_RANGE);
    CHECK_EQ(lcs_slot_free_dead(b.at, 0), LC_E_RANGE);
    CHECK_EQ(lcs_slot_free_dead(b.at, LCS_SLOTS), LC_E_RANGE);
    CHECK_EQ(lcs_slot_alive(b.at, 0), LC_E_RANGE);
    CHECK_EQ(lcs_slot_alive(b.at, LCS_SLOTS), LC_E_RANGE);
    client_die(&a);
    CHECK_EQ(lcs_slot_alive(b.at, 1), 0);
    CHECK_EQ(lc_load(&lcs_client_of(b.at, 1)->state), LCS_CLIENT_TAKEN);
    client r = reader_join(&s);
    CHECK_EQ(lcs_slot_free_dead(r.at, 1), LC_E_READONLY);
    client_forget(&r);
    CHECK_EQ(lcs_slot_free_dead(b.at, 1), LC_OK);
    CHECK_EQ(lcs_slot_free_dead(b.at, 1), LC_E_MISSING);
    CHECK_EQ(lcs_byte_held(b.life, LCS_BYTE_SLOTS + 1, 1), 0);
    client_leave(&b);
    tear_down();
}

static void attachment_says_why_it_is_of_no_use(void) {
    set_up();
    client c = client_join(&s);
    CHECK_EQ(lcs_attachment_usable(c.at), LC_OK);
    uint32_t forked = 0;
    const volatile uint32_t *word = c.at->fork_word;
    c.at->fork_word = &forked;
    CHECK_EQ(lcs_attachment_usable(c.at), LC_E_FORKED);
    CHECK_EQ(lcs_slot_release(c.at), LC_E_FORKED);
    CHECK_EQ(lcs_robust_drop(c.at), LC_E_FORKED);
    c.at->fork_word = word;
    lcs_retire(s.base);
    CHECK_EQ(lcs_attachment_usable(c.at), LC_E_RETIRED);
    CHECK_EQ(lcs_slot_claim(c.at, "", 0), LC_E_RETIRED);
    CHECK_EQ(lcs_slot_free_dead(c.at, 2), LC_E_RETIRED);
    lcs_attachment_close(c.at);
    CHECK_EQ(lcs_attachment_usable(c.at), LC_E_CLOSED);
    CHECK_EQ(lcs_slot_release(c.at), LC_E_CLOSED);
    client_forget(&c);
    tear_down();
}

static void *note_thread(void *tid) {
    *(uint32_t *)tid = (uint32_t)syscall(SYS_gettid);
    return NULL;
}

static void thread_is_gone_only_on_evidence(void) {
    uint32_t ended = 0;
    pthread_t thread;
    set_up();
    client a = client_join(&s), b = client_join(&s);
    uint32_t self = (uint32_t)syscall(SYS_gettid);
    CHECK_EQ(pthread_create(&thread, NULL, note_thread, &ended), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(!lcs_thread_gone(b.at, a.slot, self));
    if (b.at->pidns) { /* else there is no /proc to look into */
        while (!lcs_thread_gone(b.at, a.slot, ended)) {
        } /* joined a little before the kernel lets go of it */
    }
    CHECK(!lcs_thread_gone(b.at, a.slot, 0));
    CHECK(!lcs_thread_gone(b.at, 0, ended));
    CHECK(!lcs_thread_gone(b.at, LCS_SLOTS, ended));
    lcs_client *record = lcs_client_of(a.at, a.slot);
    record->start_ticks++; /* another process had that number */
    CHECK(!lcs_thread_gone(b.at, a.slot, ended));
    record->start_ticks--;
    record->pidns++; /* in another namespace the number means another process */
    CHECK(!lcs_thread_gone(b.at, a.slot, ended));
    record->pidns--;
    record->pid = 0;
    CHECK(!lcs_thread_gone(b.at, a.slot, ended));
    CHECK_EQ(lcs_start_ticks(0x7fffffff), 0);
    client_leave(&a);
    client_leave(&b);
    tear_down();
}

const test client_tests[] = {
    TEST(byte_locks_belong_to_descriptions),
    TEST(slot_says_who_took_it),
    TEST(slot_of_a_long_role),
    TEST(slots_are_63),
    TEST(slot_whose_byte_is_held_is_passed_over),
    TEST(slot_of_the_dead),
    TEST(attachment_says_why_it_is_of_no_use),
    TEST(thread_is_gone_only_on_evidence),
    END_OF_TESTS,
};
