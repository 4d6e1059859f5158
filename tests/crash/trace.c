#include "trace.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static int next_stop(pid_t pid) {
    int status;
    NEED(waitpid(pid, &status, 0) == pid);
    NEED(WIFSTOPPED(status));
    return WSTOPSIG(status);
}

trace trace_start(const char *program, const stage *real, const char *scene) {
    char pages[32];
    snprintf(pages, sizeof pages, "%llu", (unsigned long long)real->pages);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        execl(program, program, real->path, pages, scene, (char *)NULL);
        _exit(127);
    }
    NEED(next_stop(pid) == SIGTRAP); /* the exec; if it fails here, ptrace is not permitted */
    NEED(ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(long)PTRACE_O_EXITKILL) == 0);
    NEED(ptrace(PTRACE_CONT, pid, NULL, NULL) == 0);
    NEED(next_stop(pid) == SIGSTOP);
    return (trace){.pid = pid};
}

void trace_step(trace *t) {
    NEED(!t->done && ptrace(PTRACE_SINGLESTEP, t->pid, NULL, NULL) == 0);
    int signal = next_stop(t->pid);
    NEED(signal == SIGTRAP || signal == SIGSTOP);
    t->done = signal == SIGSTOP;
}

void trace_kill(trace *t) {
    int status;
    NEED(kill(t->pid, SIGKILL) == 0 && waitpid(t->pid, &status, 0) == t->pid);
    NEED(WIFSIGNALED(status));
}

void trace_end(trace *t) {
    int status;
    NEED(t->done && ptrace(PTRACE_CONT, t->pid, NULL, NULL) == 0);
    NEED(waitpid(t->pid, &status, 0) == t->pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
