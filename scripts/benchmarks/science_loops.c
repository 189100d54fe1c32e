// The loops of science_steps.py in C, one core, without -ffast-math: cc -O3 -march=native -ffp-contract=off -DREAL=float
// Each function takes parameters, the first carry and inputs, and writes its outputs [T, ...].

#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

void biquads(const REAL *restrict sos, const REAL *restrict x, REAL *restrict y, long steps) {
    REAL first[4] = {0}, second[4] = {0};
    for (long t = 0; t < steps; t++) {
        REAL value = x[t];
        for (int k = 0; k < 4; k++) {
            const REAL *s = sos + 5 * k;
            REAL out = s[0] * value + first[k];
            first[k] = s[1] * value - s[3] * out + second[k];
            second[k] = s[2] * value - s[4] * out;
            value = out;
        }
        y[t] = value;
    }
}

void average(REAL decay, const REAL *restrict x, REAL *restrict y, long steps) {
    REAL mean = 0, share = 1 - decay;
    for (long t = 0; t < steps; t++) {
        mean = decay * mean + share * x[t];
        y[t] = mean;
    }
}

void garch(REAL omega, REAL alpha, REAL beta, REAL variance, const REAL *restrict x, REAL *restrict y, long steps) {
    for (long t = 0; t < steps; t++) {
        variance = omega + alpha * x[t] * x[t] + beta * variance;
        y[t] = variance;
    }
}

// 4 states, 2 observations
void kalman(const REAL *restrict a, const REAL *restrict c, const REAL *restrict seen, REAL *restrict y, long steps) {
    enum { N = 4, M = 2 };
    REAL mean[N] = {0}, cov[N][N] = {{0}};
    for (int i = 0; i < N; i++) cov[i][i] = 1;
    for (long t = 0; t < steps; t++) {
        REAL moved[N][N], predicted[N], crossed[N][M], gain[N][M], s[M][M], rest[M];
        for (int i = 0; i < N; i++) {
            predicted[i] = 0;
            for (int k = 0; k < N; k++) predicted[i] += a[N * i + k] * mean[k];
            for (int j = 0; j < N; j++) {
                moved[i][j] = 0;
                for (int k = 0; k < N; k++) moved[i][j] += a[N * i + k] * cov[k][j];
            }
        }
        for (int i = 0; i < N; i++) {
            for (int j = 0; j < N; j++) {
                cov[i][j] = 0;
                for (int k = 0; k < N; k++) cov[i][j] += moved[i][k] * a[N * j + k];
            }
            cov[i][i] += (REAL)0.1;
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < M; j++) {
                crossed[i][j] = 0;
                for (int k = 0; k < N; k++) crossed[i][j] += cov[i][k] * c[N * j + k];
            }
        for (int i = 0; i < M; i++) {
            for (int j = 0; j < M; j++) {
                s[i][j] = 0;
                for (int k = 0; k < N; k++) s[i][j] += c[N * i + k] * crossed[k][j];
            }
            s[i][i] += (REAL)0.2;
        }
        REAL determinant = s[0][0] * s[1][1] - s[0][1] * s[1][0];
        for (int j = 0; j < M; j++) {
            rest[j] = seen[M * t + j];
            for (int k = 0; k < N; k++) rest[j] -= c[N * j + k] * predicted[k];
        }
        for (int i = 0; i < N; i++) {
            gain[i][0] = (crossed[i][0] * s[1][1] - crossed[i][1] * s[1][0]) / determinant;
            gain[i][1] = (crossed[i][1] * s[0][0] - crossed[i][0] * s[0][1]) / determinant;
            mean[i] = predicted[i] + gain[i][0] * rest[0] + gain[i][1] * rest[1];
            y[N * t + i] = mean[i];
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) cov[i][j] -= gain[i][0] * crossed[j][0] + gain[i][1] * crossed[j][1];
    }
}

void hidden_states(
    const REAL *restrict matrix, const REAL *restrict start, const REAL *restrict likelihood, REAL *restrict y,
    long steps, long states) {
    REAL belief[64], joint[64];
    memcpy(belief, start, states * sizeof(REAL));
    for (long t = 0; t < steps; t++) {
        for (long j = 0; j < states; j++) joint[j] = 0;
        for (long i = 0; i < states; i++)
            for (long j = 0; j < states; j++) joint[j] += belief[i] * matrix[states * i + j];
        REAL total = 0;
        for (long j = 0; j < states; j++) {
            joint[j] *= likelihood[states * t + j];
            total += joint[j];
        }
        for (long j = 0; j < states; j++) belief[j] = joint[j] / total;
        y[t] = log(total);
    }
}

void neurons(REAL leak, const REAL *restrict current, REAL *restrict y, long steps, long count) {
    REAL *voltage = calloc(count, sizeof(REAL));
    for (long t = 0; t < steps; t++)
        for (long i = 0; i < count; i++) {
            REAL v = leak * voltage[i] + current[count * t + i];
            y[count * t + i] = v > 1;
            voltage[i] = v > 1 ? 0 : v;
        }
    free(voltage);
}

void epidemic(
    REAL rate, REAL healing, REAL susceptible, REAL infected, const REAL *restrict contacts, REAL *restrict y,
    long steps) {
    for (long t = 0; t < steps; t++) {
        REAL new = rate * contacts[t] * susceptible * infected;
        y[t] = infected;
        susceptible = susceptible - new;
        infected = infected + new - healing * infected;
    }
}

void advantages(
    REAL discount, REAL factor, const REAL *restrict reward, const REAL *restrict value, const REAL *restrict alive,
    REAL *restrict y, long steps, long count) {
    REAL *later = calloc(2 * count, sizeof(REAL)), *next = later + count;
    for (long t = steps - 1; t >= 0; t--)
        for (long i = 0; i < count; i++) {
            long at = count * t + i;
            REAL delta = reward[at] + discount * next[i] * alive[at] - value[at];
            later[i] = delta + factor * alive[at] * later[i];
            next[i] = value[at];
            y[at] = later[i];
        }
    free(later);
}

void returns(REAL discount, const REAL *restrict reward, REAL *restrict y, long steps, long count) {
    REAL *later = calloc(count, sizeof(REAL));
    for (long t = steps - 1; t >= 0; t--)
        for (long i = 0; i < count; i++) {
            later[i] = reward[count * t + i] + discount * later[i];
            y[count * t + i] = later[i];
        }
    free(later);
}

// Gates i, f, g, o, each `hidden` columns of w [features, 4 hidden] and u [hidden, 4 hidden].
void lstm(
    const REAL *restrict w, const REAL *restrict u, const REAL *restrict b, const REAL *restrict x, REAL *restrict y,
    long steps, long batch, long features, long hidden) {
    long wide = 4 * hidden;
    REAL *gates = calloc(wide + batch * 2 * hidden, sizeof(REAL)), *h = gates + wide, *c = h + batch * hidden;
    for (long t = 0; t < steps; t++)
        for (long n = 0; n < batch; n++) {
            const REAL *row = x + (t * batch + n) * features;
            REAL *own = h + n * hidden, *cell = c + n * hidden;
            memcpy(gates, b, wide * sizeof(REAL));
            for (long k = 0; k < features; k++)
                for (long j = 0; j < wide; j++) gates[j] += row[k] * w[k * wide + j];
            for (long k = 0; k < hidden; k++)
                for (long j = 0; j < wide; j++) gates[j] += own[k] * u[k * wide + j];
            for (long j = 0; j < hidden; j++) {
                REAL i = 1 / (1 + exp(-gates[j])), f = 1 / (1 + exp(-gates[hidden + j]));
                REAL g = tanh(gates[2 * hidden + j]), o = 1 / (1 + exp(-gates[3 * hidden + j]));
                cell[j] = f * cell[j] + i * g;
                own[j] = o * tanh(cell[j]);
                y[(t * batch + n) * hidden + j] = own[j];
            }
        }
    free(gates);
}

void pendulum(REAL damping, REAL step, REAL angle, REAL speed, const REAL *restrict force, REAL *restrict y, long steps) {
    REAL half = step / 2, sixth = step / 6;
    for (long t = 0; t < steps; t++) {
        REAL a1 = speed, s1 = force[t] - sin(angle) - damping * speed;
        REAL a2 = speed + half * s1, s2 = force[t] - sin(angle + half * a1) - damping * a2;
        REAL a3 = speed + half * s2, s3 = force[t] - sin(angle + half * a2) - damping * a3;
        REAL a4 = speed + step * s3, s4 = force[t] - sin(angle + step * a3) - damping * a4;
        angle += sixth * (a1 + 2 * a2 + 2 * a3 + a4);
        speed += sixth * (s1 + 2 * s2 + 2 * s3 + s4);
        y[t] = angle;
    }
}
