/* What a survivor does after a death: the scene of every second victim, without a stage of its
 * own. */
#include "scenes.h"

static void recover(actor *v) {
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++)
        if (slot != v->at->slot)
            deed_reap(v, slot);
    NEED(lci_grow(v->h, 0, LC_BLOCK, FOREVER) == LC_OK);
}
SCENE(recover, .act = recover)
