/* Put before every file of the core (-include): after each atomic store or read-modify-write a hook
 * is called with the word's address. What a process can leave behind by dying is what memory holds
 * between two stores, so a hook that looks at a copy there sees every death that there is.
 *
 * For gcc, whose atomic builtins take words of any kind. */
#ifndef HOOKS_H
#define HOOKS_H

#include <stdatomic.h>
#include <stdbool.h>

extern void (*after_store)(const volatile void *word);

#define STORED(word) (after_store ? after_store(word) : (void)0)

#undef atomic_store_explicit
#define atomic_store_explicit(word, value, order)                  \
    __extension__({                                                \
        __auto_type stored_at = (word);                            \
        __typeof__((void)0, *stored_at) stored_value = (value);    \
        __atomic_store(stored_at, &stored_value, (order));         \
        STORED(stored_at);                                         \
    })
#undef atomic_store
#define atomic_store(word, value) atomic_store_explicit(word, value, memory_order_seq_cst)

#define AFTER(call, word)                \
    __extension__({                      \
        __auto_type changed_at = (word); \
        __auto_type result_of = (call);  \
        STORED(changed_at);              \
        result_of;                       \
    })
#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(w, v, o) AFTER(__atomic_fetch_add(changed_at, (v), (o)), w)
#undef atomic_fetch_or_explicit
#define atomic_fetch_or_explicit(w, v, o) AFTER(__atomic_fetch_or(changed_at, (v), (o)), w)
#undef atomic_fetch_and_explicit
#define atomic_fetch_and_explicit(w, v, o) AFTER(__atomic_fetch_and(changed_at, (v), (o)), w)
#undef atomic_fetch_add
#define atomic_fetch_add(w, v) atomic_fetch_add_explicit(w, v, memory_order_seq_cst)
#undef atomic_fetch_or
#define atomic_fetch_or(w, v) atomic_fetch_or_explicit(w, v, memory_order_seq_cst)
#undef atomic_fetch_and
#define atomic_fetch_and(w, v) atomic_fetch_and_explicit(w, v, memory_order_seq_cst)

#define EXCHANGED(word, expected, value, weak, success, failure)                          \
    __extension__({                                                                       \
        __auto_type changed_at = (word);                                                  \
        __typeof__((void)0, *changed_at) wanted_value = (value);                          \
        bool result_of = __atomic_compare_exchange(changed_at, (expected), &wanted_value, \
                                                   (weak), (success), (failure));         \
        if (result_of) STORED(changed_at);                                                \
        result_of;                                                                        \
    })
#undef atomic_compare_exchange_strong_explicit
#define atomic_compare_exchange_strong_explicit(w, e, v, s, f) EXCHANGED(w, e, v, 0, s, f)
#undef atomic_compare_exchange_weak_explicit
#define atomic_compare_exchange_weak_explicit(w, e, v, s, f) EXCHANGED(w, e, v, 1, s, f)
#undef atomic_compare_exchange_strong
#define atomic_compare_exchange_strong(w, e, v) \
    EXCHANGED(w, e, v, 0, memory_order_seq_cst, memory_order_seq_cst)

#endif
