/* Imitates an older CPU, or another maker's, for one process: what CPUID says is changed for every library in it.
 *
 *     cc -O1 -shared -fPIC older_cpu.c -o older_cpu.so
 *     OLDER_CPU=avx2 LD_PRELOAD=./older_cpu.so program      (no AVX-512, VNNI, AMX; avx512: no VNNI, AMX; vnni: no AMX)
 *     CPU_VENDOR=AuthenticAMD LD_PRELOAD=...                (12 letters; MKL has other kernels for it)
 *
 * Linux on x86-64 lets a process trap CPUID (arch_prctl ARCH_SET_CPUID) where CPU and hypervisor can; the handler
 * executes it and changes leaves 0 and 7. Where they cannot, the process ends with exit code 77. Programs that would
 * take SIGSEGV for themselves, as compilers and torch's loader processes do, are told that they have it.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define BIT(n) (1u << (n))

static const unsigned char CPUID_INSTRUCTION[] = {0x0f, 0xa2};
static const char *kind, *vendor;
static int hide_avx512, hide_vnni, trapping;

static long trap_cpuid(int on) { return syscall(SYS_arch_prctl, 0x1012 /* ARCH_SET_CPUID */, !on); }

int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    int (*next)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    return next(number, trapping && number == SIGSEGV ? NULL : wanted, before);
}

sighandler_t signal(int number, sighandler_t wanted) {
    sighandler_t (*next)(int, sighandler_t) = dlsym(RTLD_NEXT, "signal");
    return trapping && number == SIGSEGV ? SIG_DFL : next(number, wanted);
}

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    (void)number, (void)info;
    if (memcmp((void *)registers[REG_RIP], CPUID_INSTRUCTION, sizeof CPUID_INSTRUCTION)) {
        trapping = 0; /* a real fault: it happens again, and ends the process */
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    trap_cpuid(0);
    __cpuid_count(leaf, part, a, b, c, d);
    trap_cpuid(1);
    if (leaf == 0 && vendor)
        memcpy(&b, vendor, 4), memcpy(&d, vendor + 4, 4), memcpy(&c, vendor + 8, 4);
    if (kind && leaf == 7 && part == 0) {
        if (hide_vnni)
            c &= ~BIT(11);                             /* avx512_vnni */
        d &= ~(BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* amx_bf16, avx512_fp16, amx_tile, amx_int8 */
        if (hide_avx512) {
            b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(28) | BIT(30) | BIT(31)); /* f, dq, ifma, cd, bw, vl */
            c &= ~(BIT(1) | BIT(6) | BIT(12) | BIT(14)); /* vbmi, vbmi2, bitalg, vpopcntdq */
            d &= ~BIT(8);                                /* vp2intersect */
        }
    } else if (kind && leaf == 7 && part == 1) {
        if (hide_vnni)
            a &= ~(BIT(4) | BIT(5)), d &= ~(BIT(4) | BIT(10)); /* avx_vnni, avx512_bf16; avx_vnni_int8 and int16 */
        a &= ~BIT(21), d &= ~BIT(19);                          /* amx_fp16; avx10 */
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += sizeof CPUID_INSTRUCTION;
}

__attribute__((constructor)) static void imitate(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    kind = getenv("OLDER_CPU"), vendor = getenv("CPU_VENDOR");
    if (vendor && strlen(vendor) != 12)
        vendor = NULL;
    if (!kind && !vendor)
        return;
    hide_avx512 = kind && !strcmp(kind, "avx2"), hide_vnni = kind && strcmp(kind, "vnni");
    sigaction(SIGSEGV, &action, NULL);
    if (trap_cpuid(1))
        _exit(77);
    trapping = 1;
}
