#include "hooks.h"

void (*after_store)(const volatile void *word);
