#include "stage.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void name_parts(stage *s) {
    s->stamps = (uint64_t *)(s->base + stage_pool(&s->g));
    s->notes = (notes *)(s->base + stage_notes(&s->g));
}

static void attach(stage *s, actor *a, const char *role, uint32_t flags) {
    actor_map(a, s->path, s->pages);
    actor_claim(a, role, flags);
}

/* A new segment of `pages` pages, of which `grown` have memory, with a survivor and a reader. */
stage *stage_open(const char *path, uint64_t pages, uint64_t grown) {
    stage *s = calloc(1, sizeof *s);
    NEED(s && lci_geometry_of(pages, order_tested(), &s->g) == LC_OK);
    s->path = path;
    s->pages = pages;
    s->bytes = stage_bytes(&s->g);
    unlink(path);
    s->file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    NEED(s->file >= 0 && ftruncate(s->file, (off_t)s->bytes) == 0);
    s->base = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->file, 0);
    NEED(s->base != MAP_FAILED && lci_format(s->base, s->bytes, pages, grown, order_tested()) == LC_OK);
    name_parts(s);
    attach(s, &s->survivor, "survivor", 0);
    actor_map(&s->reader, path, pages);
    s->reader.at->readonly = 1;
    s->reader.h = lci_open(s->reader.at, pages);
    NEED(s->reader.h);
    return s;
}

/* The same client on the copy's memory. Its byte is locked in the copy's file, where nobody holds
 * the victim's: there the victim is dead. Only byte locks say who lives, /proc is not asked. */
static void mirror(stage *copy, actor *to, const actor *from) {
    uint32_t slot = from->at->slot;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", copy->file);
    int life = open(path, O_RDWR | O_CLOEXEC);
    *to = (actor){.pages = copy->pages, .stamps = copy->stamps, .notes = copy->notes};
    to->at = lcs_attachment_new(copy->base, copy->bytes, life, slot, from->at->epoch,
                                (int)from->at->readonly);
    NEED(life >= 0 && to->at);
    to->at->pidns = 0;
    to->h = lci_open(to->at, copy->pages);
    NEED(to->h);
    if (slot && from->at->life_fd >= 0 && !from->dies_too) stage_revive(copy, to);
}

stage *stage_copy(const stage *real) {
    stage *s = calloc(1, sizeof *s);
    NEED(s);
    s->file = memfd_create("bytes", MFD_CLOEXEC);
    s->pages = real->pages;
    s->bytes = real->bytes;
    s->g = real->g;
    s->base = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(s->file >= 0 && s->base != MAP_FAILED);
    memcpy(s->base, real->base, s->bytes);
    name_parts(s);
    mirror(s, &s->reader, &real->reader);
    mirror(s, &s->survivor, &real->survivor);
    s->others = real->others;
    for (uint32_t i = 0; i < s->others; i++) mirror(s, &s->other[i], &real->other[i]);
    return s;
}

static void same_hands(stage *copy, actor *to, const actor *from) {
    to->writing = from->writing;
    to->held = from->held;
    to->stopped = from->stopped;
    if (from->at->life_fd < 0) stage_die(copy, to); /* it may have died since it was copied */
}

/* The copy becomes these bytes, and its clients hold what the real ones hold. */
void stage_refresh(stage *copy, const stage *real, const uint8_t *bytes) {
    memcpy(copy->base, bytes, copy->bytes);
    for (uint32_t i = 0; i < copy->others; i++) same_hands(copy, &copy->other[i], &real->other[i]);
}

static void drop(actor *a, bool mapped) {
    if (!a->at) return;
    if (a->at->life_fd >= 0) close(a->at->life_fd);
    if (mapped) munmap(a->at->base, a->at->bytes);
    lci_close(a->h);
    free(a->at); /* a stopped one's mutex is locked for good */
}

void stage_close(stage *s) {
    bool mapped = s->path != NULL;
    drop(&s->reader, mapped);
    drop(&s->survivor, mapped);
    for (uint32_t i = 0; i < s->others; i++) drop(&s->other[i], mapped);
    munmap(s->base, s->bytes);
    close(s->file);
    if (s->path) unlink(s->path);
    free(s);
}

/* Another client of the stepper's. */
actor *stage_other(stage *s, uint32_t flags) {
    NEED(s->others < OTHERS);
    actor *a = &s->other[s->others];
    attach(s, a, "other", flags);
    s->notes->other[s->others++] = a->at->slot;
    return a;
}

/* What a death looks like to the others: nobody holds its byte any more. */
void stage_die(stage *s, actor *a) {
    if (s->path) {
        close(a->at->life_fd);
        a->at->life_fd = -1;
    } else {
        NEED(lcs_byte_unlock(a->at->life_fd, LCS_BYTE_SLOTS + a->at->slot) == LC_OK);
    }
}

/* The victim has been killed: so are those who die with it. */
void stage_die_too(stage *s) {
    for (uint32_t i = 0; i < s->others; i++)
        if (s->other[i].dies_too) stage_die(s, &s->other[i]);
}

void stage_revive(stage *s, actor *a) {
    (void)s;
    NEED(lcs_byte_lock(a->at->life_fd, LCS_BYTE_SLOTS + a->at->slot, 1) == LC_OK);
}

bool stage_alive(const stage *s, uint32_t slot) {
    return lcs_slot_alive(s->survivor.at, slot) != 0;
}
