// A client of grpc-go that does what its standard input says: README.md has the protocol.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

type options struct {
	Target, Ca, Certificate, Key string
	KeepaliveS                   int `json:"keepalive_s"`
}

type command struct {
	Id       int
	Op       string
	Method   string
	Message  []byte
	Count    int
	TimeoutS float64 `json:"timeout_s"`
	Gzip     bool
	Metadata [][2]string
	CancelS  float64 `json:"cancel_s"`
	// Answers after which a stream is cancelled; 0: it is not.
	CancelAfter int `json:"cancel_after"`
}

type result struct {
	Id      int    `json:"id"`
	Code    int    `json:"code"`
	Words   string `json:"words"`
	Answers int    `json:"answers"`
	Answer  []byte `json:"answer"`
	// grpc-status-details-bin
	Details []byte `json:"details"`
}

// Messages are bytes.
type raw struct{}

func (raw) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }
func (raw) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (raw) Name() string { return "proto" }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func security(given options) credentials.TransportCredentials {
	if given.Ca == "" {
		return insecure.NewCredentials()
	}
	pem, err := os.ReadFile(given.Ca)
	check(err)
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if given.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(given.Certificate, given.Key)
		check(err)
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config)
}

func run(conn *grpc.ClientConn, wanted command) (done result) {
	done.Id = wanted.Id
	ctx, cancel := context.WithTimeout(
		context.Background(), time.Duration(wanted.TimeoutS*float64(time.Second)))
	defer cancel()
	for _, pair := range wanted.Metadata {
		value := pair[1]
		if strings.HasSuffix(pair[0], "-bin") {
			plain, err := base64.StdEncoding.DecodeString(value)
			check(err)
			value = string(plain)
		}
		ctx = metadata.AppendToOutgoingContext(ctx, pair[0], value)
	}
	if wanted.CancelS > 0 {
		time.AfterFunc(time.Duration(wanted.CancelS*float64(time.Second)), cancel)
	}
	var trailer metadata.MD
	asked := []grpc.CallOption{grpc.Trailer(&trailer)}
	if wanted.Gzip {
		asked = append(asked, grpc.UseCompressor("gzip"))
	}
	var err error
	if wanted.Op == "stream" {
		err = stream(ctx, cancel, conn, wanted, asked, &done)
	} else if err = conn.Invoke(
		ctx, wanted.Method, &wanted.Message, &done.Answer, asked...); err == nil {
		done.Answers = 1
	}
	done.Code, done.Words = int(status.Code(err)), status.Convert(err).Message()
	if details := trailer.Get("grpc-status-details-bin"); len(details) > 0 {
		done.Details = []byte(details[0])
	}
	return done
}

func stream(ctx context.Context, cancel func(), conn *grpc.ClientConn, wanted command,
	asked []grpc.CallOption, done *result) error {
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	call, err := conn.NewStream(ctx, desc, wanted.Method, asked...)
	if err != nil {
		return err
	}
	go func() {
		for i := 0; i < wanted.Count; i++ {
			if call.SendMsg(&wanted.Message) != nil {
				return // RecvMsg says why
			}
		}
		call.CloseSend()
	}()
	for {
		var answer []byte
		if err := call.RecvMsg(&answer); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		done.Answer = answer
		if done.Answers++; done.Answers == wanted.CancelAfter {
			cancel()
		}
	}
}

func main() {
	var given options
	check(json.Unmarshal([]byte(os.Args[1]), &given))
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(security(given)),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})),
	}
	if given.KeepaliveS > 0 {
		dial = append(dial, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: time.Duration(given.KeepaliveS) * time.Second, PermitWithoutStream: true}))
	}
	conn, err := grpc.NewClient(given.Target, dial...)
	check(err)
	var printing sync.Mutex
	out := json.NewEncoder(os.Stdout)
	for in := bufio.NewReader(os.Stdin); ; {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var wanted command
		check(json.Unmarshal(line, &wanted))
		go func() {
			done := run(conn, wanted)
			printing.Lock()
			defer printing.Unlock()
			check(out.Encode(done))
		}()
	}
}
