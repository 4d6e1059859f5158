#include "trace.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void wait_for_stop(pid_t pid) {
    int status;
    NEED(waitpid(pid, &status, WUNTRACED) == pid);
    NEED(WIFSTOPPED(status));
    NEED(WSTOPSIG(status) == SIGSTOP);
}

trace trace_start(const char *program, const stage *real, const char *scene) {
    char pages[32];
    snprintf(pages, sizeof pages, "%llu", (unsigned long long)real->pages);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* it does not outlive a stepper that is killed */
        execl(program, program, real->path, pages, scene, (char *)NULL);
        _exit(127);
    }
    wait_for_stop(pid);
    return (trace){.pid = pid, .notes = real->notes};
}

bool trace_next(trace *t) {
    NEED(kill(t->pid, SIGCONT) == 0);
    wait_for_stop(t->pid);
    return !t->notes->over;
}

void trace_kill(trace *t) {
    int status;
    NEED(kill(t->pid, SIGKILL) == 0 && waitpid(t->pid, &status, 0) == t->pid);
    NEED(WIFSIGNALED(status));
}

void trace_end(trace *t) {
    int status;
    NEED(t->notes->over && kill(t->pid, SIGCONT) == 0);
    NEED(waitpid(t->pid, &status, 0) == t->pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
