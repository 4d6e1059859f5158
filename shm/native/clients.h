/* Byte locks and the client table: which clients are attached, and whether they live.
 *
 * A writer holds one of 63 slots. Its life is proved by an open-file-description lock on the slot's
 * byte, held through a description of its own that is never mapped, so that the kernel drops it
 * however the process ends and whatever PID namespace it ran in. Only the client holds that byte,
 * so a process that finds it free knows that the client is dead, whatever others do. A process that
 * takes a slot or mends a dead one holds another byte meanwhile, the slot's mending byte.
 *
 * No process globals: this file is linked into every library that needs it. */
#ifndef LC_CLIENTS_H
#define LC_CLIENTS_H

#include "lc_base.h"

/* Try to lock one byte, never waiting. LC_OK, LC_E_BUSY (another description holds it) or
 * LC_E_SYS - errno. Locking again what is held changes its kind in place. */
LC_API int lcs_byte_lock(int fd, int64_t byte, int exclusive);
LC_API int lcs_byte_unlock(int fd, int64_t byte);

/* 1: another description than `fd`'s holds a lock of either kind in [byte, byte + length);
 * 0: none does; or LC_E_SYS - errno. Works on a description opened read-only. */
LC_API int lcs_byte_held(int fd, int64_t byte, int64_t length);

/* Take the first free slot and write our identity into it. Returns the slot, 1 to 63, which is then
 * `at->slot` with `at->epoch`; LC_E_FULL when none is free, LC_E_TWICE when `at` has one. */
LC_API int lcs_slot_claim(lcs_attachment *at, const char *role, uint32_t flags);

/* Give back the own slot: epoch, FREE, then the byte. What the client held must be gone before.
 * LC_E_MISSING: there was none. Works on a retired segment and before `at` is closed. */
LC_API int lcs_slot_release(lcs_attachment *at);

/* Does the client that took this slot still hold its byte? 1 yes (also for the own slot), 0 no;
 * below 0 an error, on which the client must be taken to live. */
LC_API int lcs_slot_alive(const lcs_attachment *at, uint32_t slot);

/* Will thread `tid` of this slot's client never run again? Only ever true on evidence: within one
 * PID namespace, its process still in /proc with the recorded start and the thread exiting, dead,
 * or gone from it. Says nothing about other threads of that client: for taking over a lock, not
 * for taking back pins. */
LC_API bool lcs_thread_gone(const lcs_attachment *at, uint32_t slot, uint32_t tid);

/* Hold the mending byte of a slot whose client is dead: until it is given back no other process
 * mends or claims the slot. LC_E_BUSY: its client lives, or another process is at it. */
int lcs_slot_mend(const lcs_attachment *at, uint32_t slot);
void lcs_slot_mended(const lcs_attachment *at, uint32_t slot);

/* Free the slot of a dead client that left nothing else (a segment without a structure).
 * LC_E_BUSY while it lives, LC_E_MISSING when it is not TAKEN, LC_E_RANGE for the own slot. */
LC_API int lcs_slot_free_dead(lcs_attachment *at, uint32_t slot);

/* When a process started, in clock ticks after boot (field 22 of /proc/PID/stat); 0: unknown. */
uint64_t lcs_start_ticks(uint32_t pid);

#endif
